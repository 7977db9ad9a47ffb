"""The README's section says what the record says, beside the peer's fastest row of the same work."""

import pytest

from bench import tables
from bench.comparison import pairs
from bench.gpu_record import Recorder
from bench.tables import FEATURES, NOTHING_RECORDED, README, SPEED, markers, section, with_section
from jattn_kernels.features import feature_markdown

BEGIN, END = markers(SPEED)

SHARED = {"jax": "0.11.2", "device": "NVIDIA H200", "kernels_sha": "0"}
SHAPE = {"hq": 32, "hkv": 8, "d": 128}
DECODE = {"case": "decode", "kv": "bf16", **SHAPE, "page": 16, "GBps": 4000.0, "roofline_share": 0.91}
OF_FP8 = {"kv": "fp8_e4m3", "GBps": 3350.0, "roofline_share": 0.76}
PREFILL = {"case": "prefill", **SHAPE, "page": 16}
FP8 = {"kv_dtype": "fp8_e4m3", "q_dtype": "fp8_e4m3"}
MIXTURE = {
    "case": "moe_layer",
    "model": "Qwen3-30B-A3B",
    "experts_met": 51.8,
    "read_GBps": 3260.0,
    "TFLOPs": 4.03,
}
ROWS = {
    "decode": [
        {**DECODE, "batch": 64, "ctx": 8192, "impl": "jattn-mosaic", "time_us": 520.0},
        {**DECODE, "batch": 64, "ctx": 8192, "impl": "jattn-xla", "time_us": 9000.0},
        {**DECODE, "batch": 64, "ctx": 8192, "impl": "jattn-mosaic", "time_us": 510.0, "page": 64, "layout": "HND"},
        {**DECODE, "batch": "ragged64", "ctx": 0, "impl": "jattn-mosaic", "time_us": 1146.48},
        {**DECODE, "batch": 5, "ctx": 77, "impl": "jattn-mosaic", "time_us": 1.0},
        {**DECODE, "batch": 32, "ctx": 4096, **OF_FP8, "impl": "jattn-mosaic", "time_us": 80.0},
    ],
    "decode_features": [
        {**DECODE, "batch": 32, "ctx": 32768, "time_us": 137.0, "window": 4095},
        {**DECODE, "batch": 64, "ctx": 8192, "time_us": 540.0, "q_tokens": 4, "rope": True},
        {**DECODE, "batch": 64, "ctx": 2048, "time_us": 90.0, "shared_prefix": 1024, "chunk": 512},
        {**DECODE, "batch": 1, "ctx": 8192, "time_us": 16.0, "batch_invariant": True},
        {**DECODE, "batch": 64, "ctx": 8192, "time_us": 251.0, "kv": "fp8_e4m3", "page": 64, "layout": "HND"},
    ],
    "prefill": [
        {
            "case": "prefill",
            **SHAPE,
            "batch": 1,
            "q": 8192,
            "kv": 8192,
            "page": 16,
            "time_us": 981.477,
            "TFLOPs": 560.2,
        },
    ],
    "prefill_features": [
        {**PREFILL, "batch": "mixed", "q": 0, "kv": 0, "time_us": 400.0, "TFLOPs": 300.0},
        {**PREFILL, "batch": 1, "q": 32768, "kv": 32768, "time_us": 4000.0, "TFLOPs": 500.0, "window": 4095},
        {**PREFILL, "batch": 1, "q": 9, "kv": 9, "time_us": 3.0, "TFLOPs": 1.0, **FP8, "rope": True},
        {**DECODE, "batch": 60, "ctx": 4096, "time_us": 240.0},
    ],
    "prefill_dense": [
        {
            **PREFILL,
            "batch": 1,
            "q": 8192,
            "kv": 8192,
            "impl": "jax-cudnn",
            "dtype": "bfloat16",
            "time_us": 900.0,
            "TFLOPs": 610.0,
        },
    ],
    "accuracy": [
        {**DECODE, "batch": 8, "ctx": 8192, "error": 0.00171, "worst_error": 0.0042, "lse_error": 3.2e-6},
        {
            **PREFILL,
            "batch": 1,
            "q": 32768,
            "kv": 32768,
            **FP8,
            "error": 0.0021,
            "worst_error": 0.0063,
            "rounded_error": 0.0456,
            "lse_error": 0.00104,
        },
    ],
    "decode_step": [
        {
            "case": "decode_step",
            "batch": 1,
            "ctx": 1024,
            "page": 16,
            "time_ms": 4.482,
            "roofline_share": 0.77,
            "compile_s": 1.23,
        },
    ],
    "decode_step_moe": [{"batch": 8, "ctx": 1024, "time_ms": 6.5, "roofline_share": 0.6, "compile_s": 9.87}],
    "decode_step_latent": [
        {
            "model": "DeepSeek-V3 shapes cut to 4 layers (1 dense, 3 sparse), random bf16",
            "batch": 1,
            "ctx": 4096,
            "time_ms": 1.5,
            "roofline_share": 0.8,
            "compile_s": 30.1,
        }
    ],
    "decode_step_quantized": [
        {
            "weights": "int4",
            "kv": "float8_e4m3fn",
            "batch": 4,
            "ctx": 1024,
            "time_ms": 2.3,
            "roofline_share": 0.5,
            "compile_s": 3.4,
        },
    ],
    "moe_layer": [
        {**MIXTURE, "tokens": 8, "draw": "uniform", "impl": "jattn-mosaic", "time_us": 150.0, "roofline_share": 0.74},
        {**MIXTURE, "tokens": 8, "draw": "same", "impl": "jattn-mosaic", "time_us": 30.0, "roofline_share": 0.57},
    ],
    "moe_layer_torch": [
        {**MIXTURE, "tokens": 8, "draw": "uniform", "impl": "torch-2.11-grouped_mm", "time_us": 300.0},
    ],
}


@pytest.fixture
def record(tmp_path):
    recorder = Recorder(tmp_path, SHARED)
    for part, rows in ROWS.items():
        recorder.write(part, rows)
    return tmp_path


def test_pairs_takes_the_fastest_of_both_sides(record):
    found = pairs("decode", record=record)
    assert [(row["impl"], row["time_us"], peer["tensor_cores"]) for row, peer in found] == [
        ("jattn-mosaic", 520.0, True),
        ("jattn-mosaic", 510.0, True),
        ("jattn-mosaic", 1146.48, True),
        ("jattn-mosaic", 80.0, True),
    ]


def test_section_shows_times_and_ratios(record):
    text = section(record)
    assert "| 64 | 8,192 | 32/8 | 16 | 520.0 µs | 495.1 µs | 1.05 | 4,000 | 91% |" in text
    assert "| 64 | 8,192 | 32/8 | 64 HND | 510.0 µs |" in text
    assert "| 64, ragged | 128 to 32,768 | 32/8 | 16 | 1,146.5 µs | 573.2 µs | 2.00 |" in text
    assert "| 32 | 32,768 | 32/8 | 128 | 16 | window 4,096 | 137.0 µs | 4,000 | 91% |" in text
    assert "| 64 | 8,192 | 32/8 | 128 | 16 | 4 tokens a sequence, rotated in the kernel | 540.0 µs |" in text
    assert "| 64 | 8,192 | 32/8 | 128 | 64 HND | fp8 e4m3 keys | 251.0 µs |" in text
    assert "| 16 | chunks of 512, first 1,024 keys shared | 90.0 µs |" in text
    assert "| 16 | batch-invariant | 16.0 µs |" in text
    assert "| decode | 8 | 8,192 | bf16 | bf16 | 0.17% | 0.42% |  | 3e-06 |" in text
    assert "| prefill | 1 | 32,768 | fp8 e4m3 | fp8 e4m3 | 0.21% | 0.63% | 4.56% | 0.001 |" in text
    assert "| 1 | 8,192 | 8,192 | 16 | 560 | 560 | 1.00 |  | 610 |" in text
    assert "| 60 and 4 | 1 and 2,048 | 4,096 and 2,048 | 128 | one launch | 400.0 µs | 300 |  |  |" in text
    assert "| 1 | 32,768 | 32,768 | 128 | window 4,096 | 4,000.0 µs | 500 |" in text
    assert "| 128 | fp8 e4m3 keys, fp8 e4m3 queries, rotated in the kernel | 3.0 µs | 1 |" in text
    assert "| 1 | 1,024 | 4.48 ms | 4.98 ms | 0.90 | 77% | 1.2 s |" in text
    assert "| 8 | 1,024 | 6.50 ms | 60% | 9.9 s |" in text
    assert "| int4 | fp8 | 4 | 1,024 | 2.30 ms | 50% | 3.4 s |" in text
    assert "| Qwen3-30B-A3B | 8 | uniform | 52 | 150.0 µs | 300.0 µs | 0.50 | 3,260 | 4 | 74% |" in text
    assert "| Qwen3-30B-A3B | 8 | same | 52 | 30.0 µs |  |  | 3,260 | 4 | 57% |" in text
    assert "NVIDIA H200, JAX 0.11.2" in text
    assert "bench/results/decode.svg" in text
    assert "bench/results/prefill.svg" in text
    assert "| 32 | 4,096 | 32/8 | 16 | 80.0 µs | 109.9 µs | 0.73 | 3,350 | 76% |" in text
    assert "9,000" not in text


def test_section_leaves_out_what_was_not_recorded(record):
    for part in ("decode", "prefill", "prefill_features", "prefill_dense"):
        (record / f"{part}.jsonl").unlink()
    text = section(record)
    assert "PyTorch" in text
    assert "Prefill" not in text
    assert "svg" not in text


def test_section_of_one_part_tells_its_device(tmp_path):
    Recorder(tmp_path, SHARED).write("decode_features", ROWS["decode_features"])
    assert "NVIDIA H200, JAX 0.11.2" in section(tmp_path)


def test_section_says_that_nothing_is_recorded(tmp_path):
    assert section(tmp_path) == NOTHING_RECORDED


def test_with_section_replaces_what_stands_between_the_markers():
    once = with_section(f"a\n{BEGIN}\nold\n{END}\nb", SPEED, "new")
    assert once == f"a\n{BEGIN}\n\nnew\n\n{END}\nb"
    assert with_section(once, SPEED, "new") == once


@pytest.mark.parametrize("text", ["", f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}", BEGIN])
def test_with_section_needs_its_markers(text):
    with pytest.raises(ValueError, match="must have one"):
        with_section(text, SPEED, "new")


def test_readme_is_what_the_record_makes_it():
    text = README.read_text(encoding="utf-8")
    assert with_section(text, SPEED, section()) == text


def test_readme_has_the_features_that_dispatch_serves():
    text = README.read_text(encoding="utf-8")
    assert with_section(text, FEATURES, feature_markdown()) == text


def test_main_writes_section_and_pictures(record, tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    pictures = {case: (tmp_path / file.name, *rest) for case, (file, *rest) in tables.PICTURES.items()}
    readme.write_text("\n".join((*markers(SPEED), *markers(FEATURES))))
    monkeypatch.setattr(tables, "README", readme)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PICTURES", pictures)
    tables.main(record)
    assert "520.0 µs" in readme.read_text()
    assert feature_markdown() in readme.read_text()
    assert [file.read_text()[:4] for file, *_ in pictures.values()] == ["<svg", "<svg"]
