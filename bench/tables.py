"""The README's tables: speed, made from the record, and features, asked of dispatch: `python -m bench.tables`."""

import textwrap
from collections.abc import Iterable
from itertools import starmap
from pathlib import Path

from bench import plots
from bench.accuracy import SAMPLED_TOKENS
from bench.comparison import dense_equivalents, latent_pairs, mixture_pairs, pairs, triton_pairs
from bench.gpu_record import PARTS
from bench.record_files import RECORD, ROOT, Row, read_rows
from bench.step_cells import Cells, cells_beside, model_of, quantized_cells, step_cells
from jattn_kernels.features import feature_markdown

SPEED, FEATURES = "bench", "features"
README = ROOT / "README.md"
PICTURES = {  # by case: file, text, and what draws it
    "decode": (ROOT / "bench" / "results" / "decode.svg", "Decode bandwidth beside FlashInfer's", plots.decode_picture),
    "prefill": (ROOT / "bench" / "results" / "prefill.svg", "Prefill speed beside FlashInfer's", plots.prefill_picture),
}
_DENSE = {"jax-attention_mgpu": "`attention_mgpu`", "jax-cudnn": "cuDNN"}  # columns, by implementation
NOTHING_RECORDED = "No measurements on a GPU are recorded yet."

_ABSORBED = {None: "absorbed", "fp8_e4m3": "absorbed, fp8", "fp8_ds_mla": "absorbed, fp8 with scales of tiles"}
_IN_FEWER_BITS = ("decode_step_quantized", "decode_step_awq")
_LATENT_RATES = ("GB/s", "TFLOP/s")


def section(record: Path = RECORD) -> str:
    """Markdown of the tables; a part that was not recorded is left out."""
    parts = [
        _table(
            "Decode, paged, bf16, random page order, FlashInfer with pages of 16 in NHD. Time of one call; `GB/s` of "
            "keys and values.",
            ("batch", "context", "heads", "page", "jattn", "FlashInfer", "ratio", "GB/s", "of read bandwidth"),
            (_decode_cells(row, peer) for row, peer in pairs("decode", record=record) if row["kv"] == "bf16"),
        ),
        _table(
            "The same over fp8 e4m3 keys and values, queries in bf16; FlashInfer over fp8 too.",
            ("batch", "context", "heads", "page", "jattn", "FlashInfer", "ratio", "GB/s", "of read bandwidth"),
            (_decode_cells(row, peer) for row, peer in pairs("decode", record=record) if row["kv"] == "fp8_e4m3"),
        ),
        _table(
            "Decode with more than plain heads over all keys. `GB/s` of the keys and values that are seen, once; 100% "
            "is 4,386 GB/s, which a maximum over 4 GB reached.",
            ("batch", "context", "heads", "head dim", "page", "what", "jattn", "GB/s", "of read bandwidth"),
            map(_feature_cells, read_rows(record / "decode_features.jsonl")),
        ),
        _table(
            "Prefill, paged, causal, bf16, FlashInfer with pages of 16: TFLOP/s. Beside it JAX's dense "
            "attention, which reads no pages: `attention_mgpu` in float16 at its best tile, and cuDNN.",
            ("batch", "new tokens", "context", "page", "jattn", "FlashInfer FA3", "ratio", *_DENSE.values()),
            ((*_prefill_cells(row, peer), *_dense_cells(row, record)) for row, peer in pairs("prefill", record=record)),
        ),
        _table(
            "Prefill with other prompts, heads and rules, and beside decodes. TFLOP/s of the pairs of a query and a "
            "key that it sees; the last two columns as above. What is done to queries alone is timed once in four "
            "calls: with fp8 keys and bf16 queries a call of its own takes some 170 µs more, one that rotates 25.",
            ("batch", "new tokens", "context", "head dim", "what", "jattn", "TFLOP/s", *_DENSE.values()),
            (
                (*_prefill_feature_cells(row), *_dense_cells(row, record))
                for row in read_rows(record / "prefill_features.jsonl")
            ),
        ),
        _table(
            "Latent attention at DeepSeek's widths, bf16: absorbed over latent rows of 576 numbers, a decode or new "
            "tokens behind what is there; and a prompt over keys of 192 and values of 128 that were made of rows.",
            ("what", "batch", "new tokens", "context", "heads", "page", "jattn", "FlashInfer", "ratio", *_LATENT_RATES),
            starmap(_latent_cells, latent_pairs(record)),
        ),
        _table(
            "How far results are from exact attention over the numbers that a call was given: the error of a head's "
            "output vector over the vector's length, root mean square and worst, and the worst error of a natural-log "
            f"lse; of a prompt at {SAMPLED_TOKENS} of its tokens. Rounding included: the same beside exact attention "
            "over the normal numbers that were rounded to fp8.",
            ("call", "batch", "context", "keys", "queries", "error", "worst", "rounding included", "lse"),
            map(_accuracy_cells, read_rows(record / "accuracy.jsonl")),
        ),
        _table(
            "A whole decode step of Llama-3-8B shapes, random bf16 weights. PyTorch: FlashInfer, inductor, one CUDA "
            "graph. The roofline is weights, keys and values over 4,386 GB/s; the step's compilation is "
            "timed without Pallas's import.",
            ("batch", "context", "jattn", "PyTorch", "ratio", "of the roofline", "compile"),
            starmap(cells_beside, pairs("decode_step", record=record)),
        ),
        _table(
            "The same of Qwen3-30B-A3B shapes, 128 experts of which a token goes to 8. The roofline reads the experts "
            "that a uniform draw meets.",
            ("batch", "context", "jattn", "of the roofline", "compile"),
            map(step_cells, read_rows(record / "decode_step_moe.jsonl")),
        ),
        _table(
            "The same of models that keep latents: DeepSeek-V2-Lite, and one dense and three sparse layers of "
            "DeepSeek-V3, 256 experts of which a token goes to 8.",
            ("model", "batch", "context", "jattn", "of the roofline", "compile"),
            ((model_of(row), *step_cells(row)) for row in read_rows(record / "decode_step_latent.jsonl")),
        ),
        _table(
            "The step of Llama-3-8B shapes with its projections in fewer bits: fp8 with a scale for each output, rows "
            "rounded by token, and int4 in groups of 128, as awq with zero points; keys and values in bf16, or e4m3 "
            "without scales.",
            ("weights", "keys", "batch", "context", "jattn", "of the roofline", "compile"),
            map(quantized_cells, [row for part in _IN_FEWER_BITS for row in read_rows(record / f"{part}.jsonl")]),
        ),
        _table(
            "The step of models whose experts are held in fewer bits: gpt-oss-20b shapes, 32 experts in mxfp4 of which "
            "a token goes to 4, all else in bf16; Qwen3-30B-A3B shapes, experts and projections in fp8.",
            ("model", "weights", "keys", "batch", "context", "jattn", "of the roofline", "compile"),
            ((model_of(row), *quantized_cells(row)) for row in read_rows(record / "decode_step_moe_quantized.jsonl")),
        ),
        _table(
            "A layer's mixture of experts in bf16, routing and sum included. PyTorch: `torch._grouped_mm`, the fastest "
            "of four ways to arrange weights and sum, one CUDA graph. `GB/s` of the experts met, once; the roofline is "
            "their bytes over 4,386 GB/s or the products over 740 TFLOP/s.",
            ("model", "tokens", "draw", "experts", "jattn", "PyTorch", "ratio", "GB/s", "TFLOP/s", "of the roofline"),
            starmap(_mixture_cells, mixture_pairs(record)),
        ),
        _table(
            "Triton's kernels, which serve other NVIDIA GPUs and what Mosaic's refuse: bf16 unless said, 32 "
            "query heads over 8 of 128 numbers. Beside them the Triton kernels of vLLM 0.33 (pages of 16) and SGLang "
            "0.5.23 (pages of 1) as those choose them.",
            ("what", "batch", "context", "page", "jattn", "GB/s or TFLOP/s", "vLLM", "SGLang"),
            starmap(_triton_cells, triton_pairs(record)),
        ),
    ]
    parts = [part for part in parts if part]
    if not parts:
        return NOTHING_RECORDED
    pictures = [
        f"![{text}]({file.relative_to(ROOT).as_posix()})"
        for case, (file, text, _) in PICTURES.items()
        if pairs(case, record=record)
    ]
    row = next(row for part in PARTS if part != "tests" for row in read_rows(record / f"{part}.jsonl"))
    head = (
        f"Each table on one {row['device']}, JAX {row['jax']}, beside FlashInfer 0.7.2 on a GPU of the same type. "
        "A ratio below 1 is a time shorter than the peer's. The rows are `bench/results/h200/`; `python -m "
        "bench.gpu_record` measures them and `python -m bench.tables` writes this section."
    )
    return "\n\n".join([textwrap.fill(head, 120), *pictures, *parts])


def _table(caption: str, head: Cells, rows: Iterable[Cells]) -> str:
    """A table with its caption; nothing if it has no rows."""
    if not (lines := list(rows)):
        return ""
    return "\n".join([textwrap.fill(caption, 120), "", *map(_line, (head, ("--:",) * len(head), *lines))])


def _line(cells: Cells) -> str:
    return f"| {' | '.join(cells)} |"


def _decode_cells(row: Row, peer: Row) -> Cells:
    batch = "64, ragged" if row["batch"] == "ragged64" else str(row["batch"])
    context = "128 to 32,768" if row["batch"] == "ragged64" else f"{row['ctx']:,}"
    return (
        batch,
        context,
        f"{row['hq']}/{row['hkv']}",
        _page(row),
        f"{row['time_us']:,.1f} µs",
        f"{peer['time_us']:,.1f} µs",
        f"{row['time_us'] / peer['time_us']:.2f}",
        f"{row['GBps']:,.0f}",
        f"{row['roofline_share']:.0%}",
    )


def _feature_cells(row: Row) -> Cells:
    return (
        str(row["batch"]),
        f"{row['ctx']:,}",
        f"{row['hq']}/{row['hkv']}",
        str(row["d"]),
        _page(row),
        _what(row),
        f"{row['time_us']:,.1f} µs",
        f"{row['GBps']:,.0f}",
        f"{row['roofline_share']:.0%}",
    )


def _latent_cells(row: Row, peer: Row | None) -> Cells:
    return (
        "expanded" if row["case"] == "expanded" else _ABSORBED[row.get("kv_dtype")],
        str(row["batch"]),
        f"{row.get('q', 1):,}",
        f"{row['ctx']:,}",
        str(row["hq"]),
        str(row.get("page", "")),
        f"{row['time_us']:,.1f} µs",
        "" if peer is None else f"{peer['time_us']:,.1f} µs",
        "" if peer is None else f"{row['time_us'] / peer['time_us']:.2f}",
        f"{row['GBps']:,.0f}" if "GBps" in row else "",
        f"{row['TFLOPs']:,.0f}",
    )


def _prefill_cells(row: Row, peer: Row) -> Cells:
    return (
        str(row["batch"]),
        f"{row['q']:,}",
        f"{row['kv']:,}",
        _page(row),
        f"{row['TFLOPs']:,.0f}",
        f"{peer['TFLOPs']:,.0f}",
        f"{row['time_us'] / peer['time_us']:.2f}",
    )


def _prefill_feature_cells(row: Row) -> Cells:
    if row["case"] == "decode":
        return (str(row["batch"]), "1", f"{row['ctx']:,}", str(row["d"]), "decode", f"{row['time_us']:,.1f} µs", "")
    mixed = row["batch"] == "mixed"
    return (
        "60 and 4" if mixed else str(row["batch"]),
        "1 and 2,048" if mixed else f"{row['q']:,}",
        "4,096 and 2,048" if mixed else f"{row['kv']:,}",
        str(row["d"]),
        _what(row),
        f"{row['time_us']:,.1f} µs",
        f"{row['TFLOPs']:,.0f}",
    )


def _what(row: Row) -> str:
    """What a row does besides plain attention over all keys."""
    what = (
        "one launch" if row["batch"] == "mixed" else "",
        f"{row['q_tokens']} tokens a sequence" if "q_tokens" in row else "",
        f"window {row['window'] + 1:,}" if "window" in row else "",
        f"chunks of {row['chunk']:,}" if "chunk" in row else "",
        f"first {row['shared_prefix']:,} keys shared" if "shared_prefix" in row else "",
        "fp8 e4m3 keys" if "fp8_e4m3" in (row.get("kv"), row.get("kv_dtype")) else "",
        "fp8 e4m3 queries" if row.get("q_dtype") == "fp8_e4m3" else "",
        "rotated in the kernel" if "rope" in row else "",
        "in two passes" if "two_passes" in row else "",
        "batch-invariant" if "batch_invariant" in row else "",
    )
    return ", ".join(filter(None, what))


def _dense_cells(row: Row, record: Path) -> Cells:
    others = dense_equivalents(row, record=record) if row["case"] == "prefill" else {}
    return tuple(f"{others[name]['TFLOPs']:,.0f}" if name in others else "" for name in _DENSE)


def _triton_cells(row: Row, peers: dict[str, Row]) -> Cells:
    decode = row["case"] == "decode"
    what = "decode" if decode else "prefill"
    return (
        f"{what}, fp8 keys" if decode and row["kv"] != "bf16" else what,
        str(row["batch"]),
        f"{row['ctx'] if decode else row['kv']:,}",
        str(row["page"]),
        f"{row['time_us']:,.1f} µs",
        f"{row['GBps'] if decode else row['TFLOPs']:,.0f}",
        *(f"{peers[name]['time_us']:,.1f} µs" if name in peers else "" for name in ("vllm", "sglang")),
    )


def _mixture_cells(row: Row, peer: Row | None) -> Cells:
    return (
        row["model"],
        f"{row['tokens']:,}",
        row["draw"],
        f"{row['experts_met']:.0f}",
        f"{row['time_us']:,.1f} µs",
        "" if peer is None else f"{peer['time_us']:,.1f} µs",
        "" if peer is None else f"{row['time_us'] / peer['time_us']:.2f}",
        f"{row['read_GBps']:,.0f}",
        f"{row['TFLOPs']:,.0f}",
        f"{row['roofline_share']:.0%}",
    )


def _accuracy_cells(row: Row) -> Cells:
    is_decode = row["case"] == "decode"
    return (
        row["case"],
        str(row["batch"]),
        f"{row['ctx' if is_decode else 'kv']:,}",
        (row["kv"] if is_decode else row.get("kv_dtype", "bf16")).replace("_", " "),
        row.get("q_dtype", "bf16").replace("_", " "),
        f"{row['error']:.2%}",
        f"{row['worst_error']:.2%}",
        f"{row['rounded_error']:.2%}" if "rounded_error" in row else "",
        f"{row['lse_error']:.1g}",
    )


def _page(row: Row) -> str:
    return f"{row['page']} {row['layout']}" if "layout" in row else str(row["page"])


def markers(name: str) -> tuple[str, str]:
    """What stands before and after a section."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def with_section(text: str, name: str, body: str) -> str:
    """The text with what stands between a section's markers replaced.

    Raises:
        ValueError: The markers are missing, or not one of each in their order.
    """
    begin, end = markers(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"The README must have one `{begin}` and after it one `{end}`.")
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{body}\n\n{end}{rest.split(end)[1]}"


def main(record: Path = RECORD) -> None:
    """Writes the README's sections and the pictures that they show."""
    text = with_section(README.read_text(encoding="utf-8"), SPEED, section(record))
    README.write_text(with_section(text, FEATURES, feature_markdown()), encoding="utf-8")
    for case, (file, _, draw) in PICTURES.items():
        if rows := pairs(case, record=record):
            file.write_text(draw(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
