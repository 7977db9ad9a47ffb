"""Keys and values converted ahead of the Hopper extend kernel: against the oracle, lowered for CUDA, and when."""

import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.mosaic.sm90.extend import entry as extend
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendDtypes
from jattn_kernels.mosaic.sm90.extend.prepass import has_prepass
from tests.kernels.harness.case_table import assert_close, build
from tests.kernels.harness.extend_calls import (
    DTYPES,
    FP8_WIDTHS,
    INTERPRETED,
    LAYERS,
    LONG,
    NAMES_OF_SCALES,
    ONE,
    SLOW,
    attend,
    derived,
    interpreted_in_few_blocks,
    lower_for_cuda,
)
from tests.often import slow


@pytest.fixture
def interpreter():
    with interpreted_in_few_blocks():
        yield


PAGED = [case for case in (*INTERPRETED, *SLOW) if case.operation == "paged_extend"]
AT_ONCE = ("fp8", "hnd_layers")


@pytest.mark.parametrize(
    "case",
    [
        *(case if case.name in AT_ONCE else slow(case) for case in PAGED),
        derived("rope_combined_layers", of="rope", **LAYERS, combined_pool="kv_first", page_size=256, **LONG),
        pytest.param(
            derived("empty_hnd", page_layout="HND", q_lens=(3, 0, 5), kv_lens=(9, 140, 0), **ONE),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda case: case.name,
)
def test_mosaic_extend_over_keys_of_a_prepass_agrees_with_the_oracle_without_races(interpreter, monkeypatch, case):
    monkeypatch.setattr(extend, "has_prepass", lambda *_, **__: True)
    inputs = build(case)
    out, lse = attend(case, inputs)
    assert_close(case, inputs, out, lse)


def lower_with_keys_made_ready(monkeypatch, q_dtype, kv_dtype, head_dim, value_dim, page_size, page_layout, theta):
    monkeypatch.setattr(extend, "has_prepass", lambda *_, **__: True)
    facts = {"kv_dtype": kv_dtype, "value_dim": value_dim, "options": NAMES_OF_SCALES, "rope_theta": theta}
    lowered = lower_for_cuda(q_dtype, head_dim, page_size, page_layout, 4, **facts, given=True)
    assert lowered.count("mosaic_gpu_v2") == 2


@pytest.mark.parametrize(
    "facts",
    [
        ("bfloat16", "bfloat16", 128, 128, 16, "NHD", 1e4),
        slow(("bfloat16", "bfloat16", 80, 96, 16, "NHD", None)),
        slow(("float16", "float16", 192, 128, 256, "HND", 1e4)),
        slow(("float16", "float8_e5m2", 128, 64, 8, "NHD", None)),
    ],
    ids=str,
)
def test_mosaic_extend_lowers_for_cuda_with_a_prepass(monkeypatch, facts):
    lower_with_keys_made_ready(monkeypatch, *facts)


@pytest.mark.slow
@pytest.mark.parametrize("theta", [None, 1e4])
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize(("head_dim", "value_dim"), FP8_WIDTHS)
def test_mosaic_extend_lowers_for_cuda_with_a_prepass_of_every_dtype_and_width(
    monkeypatch, q_dtype, kv_dtype, head_dim, value_dim, theta
):
    number = len(DTYPES) * FP8_WIDTHS.index((head_dim, value_dim)) + DTYPES.index((q_dtype, kv_dtype))
    page_size, page_layout = (8, 16, 64, 128, 256)[number % 5], ("NHD", "HND")[number % 2]
    lower_with_keys_made_ready(monkeypatch, q_dtype, kv_dtype, head_dim, value_dim, page_size, page_layout, theta)


@pytest.mark.parametrize(
    ("facts", "num_tokens", "num_seqs", "max_keys", "ahead"),
    [
        ({}, 8192, 1, 8192, True),
        ({"batch_invariant": True}, 8192, 1, 8192, False),
        ({}, 8192, 16, 8192, True),
        ({}, 8192, 17, 8192, False),  # bytes
        ({}, 65536, 1024, 8, True),
        ({}, 131072, 1025, 8, False),  # bytes in whole tiles
        ({}, 256, 4, 8192, True),
        ({}, 255, 4, 8192, False),  # work
        ({"window_left": 1023}, 2048, 1, 32768, True),
        ({"window_left": 1022}, 2048, 1, 32768, False),
        ({"chunk_size": 1023}, 2048, 1, 32768, False),
    ],
)
def test_keys_are_rotated_ahead_where_that_is_little_beside_the_work(facts, num_tokens, num_seqs, max_keys, ahead):
    spec = AttentionSpec(**{"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rope_theta": 1e4, **facts})
    dtypes = ExtendDtypes.of("bfloat16", "bfloat16", spec)
    sizes = {"page_size": 16, "num_tokens": num_tokens, "num_seqs": num_seqs, "max_keys": max_keys}
    assert has_prepass(spec, dtypes, **sizes) == ahead


@pytest.mark.parametrize(
    ("facts", "page_size", "num_tokens", "ahead"),
    [
        ({}, 16, 8192, True),
        ({}, 16, 1024, False),
        ({}, 32, 8192, False),
        ({"head_dim": 64}, 32, 8192, True),
        ({"head_dim": 256}, 16, 8192, False),
        ({"batch_invariant": True}, 16, 8192, True),
        ({"kv_dtype": "float8_e4m3fn"}, 64, 1024, True),
        ({"kv_dtype": "float8_e4m3fn"}, 64, 1023, False),
        ({"kv_dtype": "float8_e4m3fn", "batch_invariant": True}, 64, 8192, False),
        ({"kv_dtype": "float8_e4m3fn", "q_dtype": "float8_e4m3fn"}, 16, 8192, False),
    ],
)
def test_small_pages_are_gathered_and_fp8_is_dequantised_ahead_for_many_rows(facts, page_size, num_tokens, ahead):
    facts = dict(facts)
    dtypes = facts.pop("q_dtype", "bfloat16"), facts.pop("kv_dtype", "bfloat16")
    spec = AttentionSpec(**{"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, **facts})
    sizes = {"page_size": page_size, "num_tokens": num_tokens, "num_seqs": 1, "max_keys": 8192}
    assert has_prepass(spec, ExtendDtypes.of(*dtypes, spec), **sizes) == ahead
