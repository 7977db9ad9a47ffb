"""The Hopper decode kernel on the CPU: against the oracle under the interpreter, and lowered for CUDA."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.attention import make_schedule, paged_decode
from jattn_kernels.call import AttentionOptions, Device
from jattn_kernels.lowering.split_schedule import DecodeSchedule
from jattn_kernels.mosaic.sm90.decode import split_kv as paged
from tests.kernels.harness.case_table import Case, assert_close, build
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.mosaic_calls import mosaic_call
from tests.often import often, slow


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU; the interpreter is it."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    monkeypatch.setattr(paged, "num_sms", lambda: 3)  # few workers: the interpreter is slow
    with interpreted():
        yield


def case(name, *, q_len=1, kv_lens=(13, 1, 0, 70), page_size=16, dtype="bfloat16", spec=None, **fields):
    facts = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64} | (spec or {})
    return Case(
        name=name,
        operation="paged_decode",
        spec=AttentionSpec(**facts),
        q_lens=(q_len,) * len(kv_lens),
        kv_lens=kv_lens,
        page_size=page_size,
        dtype=dtype,
        **fields,
    )


def attend(case, inputs):
    """The output and its lse, compiled as one: by itself each operation around the kernel would be."""
    decode = functools.partial(paged_decode, spec=case.spec, return_lse=True, implementation="mosaic")
    return jax.jit(decode)(*inputs.args, **inputs.options)


# Each loop of the kernel in one case at least, several features to a case; the others are in SLOW.
INTERPRETED = [
    case("plain"),
    case("heads_share_rows_dim_128", spec={"num_q_heads": 8, "num_kv_heads": 8, "head_dim": 128}, kv_lens=(70, 9)),
    case(
        "window_sinks_alibi", spec={"window_left": 70, "num_q_heads": 16}, kv_lens=(300, 9, 0), sinks=True, alibi=True
    ),
    case(
        "chunk_soft_cap_page_larger_than_a_tile",
        spec={"chunk_size": 64, "logits_soft_cap": 5.0, "head_dim": 128},
        kv_lens=(200, 65),
        kv_start=(5, 64),
        page_size=128,
    ),
    case("tree", q_len=6, kv_lens=(70, 6), tree=(-1, 0, 0, 1, 1, -1), spec={"window_left": 20, "num_q_heads": 32}),
    case(
        "fp8", kv_dtype="float8_e4m3fn", q_scale="rows", kv_scale="rows", kv_lens=(300, 9), num_layers=2, layer_index=1
    ),
    case(
        "fp8_dim_256",
        kv_dtype="float8_e4m3fn",
        q_len=2,
        kv_lens=(70, 9),
        spec={"num_q_heads": 12, "num_kv_heads": 3, "head_dim": 256},
    ),
    case("invariant", kv_lens=(1100, 9, 0), spec={"num_q_heads": 2, "num_kv_heads": 1, "batch_invariant": True}),
]
SLOW = [
    case("dim_256", spec={"head_dim": 256, "num_q_heads": 2, "num_kv_heads": 1}, kv_lens=(70, 3)),
    case(
        "fp8_rows_stay",
        kv_dtype="float8_e4m3fn",
        q_scale="rows",
        kv_scale="rows",
        kv_lens=(70, 9),
        num_layers=2,
        layer_index=1,
        spec={"num_q_heads": 8, "head_dim": 128},
    ),
    case(
        "positions_padding_rows_dim_80",
        q_len=2,
        kv_start=(0, 5, 0, 64),
        q_start=(12, 4, 0, 100),
        padding_rows=2,
        spec={"head_dim": 80},
    ),
    case("rope_verify", q_len=3, kv_lens=(70, 3), kv_start=(5, 7000), spec={"rope_theta": 5e5, "head_dim": 128}),
    case("dim_128_hnd_layers", spec={"head_dim": 128, "page_layout": "HND"}, num_layers=2, layer_index=1),
    case("page_larger_than_a_tile", page_size=128, spec={"head_dim": 128}, kv_lens=(200, 64)),
    case("positions_padding_rows", q_len=2, kv_start=(0, 5, 0, 64), q_start=(12, 4, 0, 100), padding_rows=2),
    case("dim_80", spec={"head_dim": 80}),
    case("chunk_soft_cap", spec={"chunk_size": 64, "logits_soft_cap": 5.0}, kv_lens=(130, 65), kv_start=(5, 64)),
    case("verify_more_rows_than_one_block", q_len=5, kv_lens=(40,), spec={"num_q_heads": 32}),  # "tree" has them too
    case("many_items_a_worker", kv_lens=(70, 3, 0, 65, 130, 1, 16), spec={"num_q_heads": 2, "num_kv_heads": 1}),
    # test_key_rotation has one head of fp8 too.
    case("fp8_one_kv_head", kv_dtype="float8_e4m3fn", kv_lens=(70,), spec={"num_q_heads": 2, "num_kv_heads": 1}),
    case("boundaries", kv_lens=(127, 128, 129), page_size=32),
    case("verify", q_len=4, kv_lens=(130, 4, 2)),
    case("group_5", spec={"num_q_heads": 5, "num_kv_heads": 1}),
    case("heads_share_rows", spec={"num_q_heads": 16, "num_kv_heads": 4}, kv_lens=(300, 9, 0)),
    case("page_8", page_size=8),
    case(
        "wide_page_kv_first_hnd",
        page_size=256,
        spec={"combined_pool": "kv_first", "page_layout": "HND"},
        kv_lens=(300,),
    ),
    case("dim_192_128", spec={"head_dim": 192, "v_head_dim": 128}, kv_lens=(70, 3)),
    case("windows_verify", spec={"causal": False, "window_left": 5, "window_right": 2}, q_len=2, kv_lens=(70, 3)),
    case("alibi_verify", alibi=True, q_len=3, kv_lens=(70, 3), spec={"causal": False}),
    case("fp8_queries", dtype="float8_e4m3fn", kv_dtype="float8_e5m2", kv_lens=(70, 0), q_scale="heads"),
]


# What the other interpreted ones have is in these, in the tests below, or in test_window_pages: chunks.
OFTEN = ("window_sinks_alibi", "tree", "fp8", "invariant")


@pytest.mark.parametrize(
    "case",
    often([*INTERPRETED, *SLOW], [case for case in INTERPRETED if case.name in OFTEN]),
    ids=lambda case: case.name,
)
def test_mosaic_decode_agrees_with_the_oracle_without_races(hopper, case):
    inputs = build(case)
    assert_close(case, inputs, *attend(case, inputs))


def test_mosaic_decode_in_splits_with_a_given_schedule_is_the_same(hopper):
    split = case("split", kv_lens=(600, 9), dtype="float16")
    inputs = build(split)
    page_size, lens = split.page_size, inputs.args[4]
    facts = {"spec": split.spec, "num_tokens": 1, "dtype": split.dtype, "page_size": page_size}
    schedule = jax.jit(functools.partial(make_schedule, **facts))(lens)
    assert isinstance(schedule.work, DecodeSchedule)
    out, lse = attend(split, inputs)
    assert_close(split, inputs, out, lse)
    given = attend(split, inputs._replace(kwargs={**inputs.kwargs, "schedule": schedule}))
    np.testing.assert_array_equal(given[0], out)


@pytest.mark.parametrize(
    "spec",
    [
        {"num_q_heads": 8, "head_dim": 128},  # heads share rows of a block
        slow({"num_q_heads": 8, "num_kv_heads": 4}),
        slow({"num_q_heads": 8, "num_kv_heads": 1}),
        slow({"num_q_heads": 16, "num_kv_heads": 1}),
        slow({"num_q_heads": 8, "window_left": 20}),
        slow({"num_q_heads": 16, "num_kv_heads": 1, "window_left": 20}),
    ],
)
def test_a_mask_of_one_token_is_all_heads(hopper, spec):
    masked = case("mask", kv_lens=(70, 9, 0), spec=spec, custom_mask=True)
    inputs = build(masked)
    assert_close(masked, inputs, *attend(masked, inputs))


# Each value of each fact once; test_lowering and the key of the GPU's record lower many more.
_BATCHES = ((4, 1, 4), (5, 3, 4), (4, 1, 1))  # queries a key head, tokens, sequences
_OFTEN_LOWERED = {("bfloat16", 128, 16, "NHD"): _BATCHES[2:], ("float16", 128, 128, "HND"): _BATCHES[:1]}
_LOWERED = itertools.product(
    ("bfloat16", "float16"), (64, 80, 96, 128, 192, 256), (8, 16, 32, 64, 128, 256), ("NHD", "HND")
)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size", "page_layout", "batches"),
    [
        *((*facts, batches) for facts, batches in _OFTEN_LOWERED.items()),
        *(slow(*facts, _BATCHES) for facts in _LOWERED),
    ],
)
def test_mosaic_decode_lowers_for_cuda(dtype, head_dim, page_size, page_layout, batches):
    for group_size, num_tokens, num_seqs in batches:
        spec = AttentionSpec(num_q_heads=2 * group_size, num_kv_heads=2, head_dim=head_dim, page_layout=page_layout)
        page = (page_size, 2) if page_layout == "NHD" else (2, page_size)
        pages = jax.ShapeDtypeStruct((3, 10, *page, head_dim), dtype)
        q = jax.ShapeDtypeStruct((num_seqs, num_tokens, spec.num_q_heads, head_dim), dtype)
        ints = jax.ShapeDtypeStruct((num_seqs,), jnp.int32)
        table = jax.ShapeDtypeStruct((num_seqs, 6), jnp.int32)

        def decode(q, k_pages, v_pages, table, lens, layer, spec=spec):
            options = AttentionOptions(layer_index=layer)
            arrays = q, k_pages, v_pages, table, lens
            return paged.paged_decode(*mosaic_call("paged_decode", arrays, options, spec, page_size))

        traced = jax.jit(decode).trace(q, pages, pages, table, ints, jax.ShapeDtypeStruct((), jnp.int32))
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


_FP8 = {"kv_dtype": "float8_e4m3fn"}
_FEATURES = {
    "window_pages_first_hnd_scales": (
        {"window_left": 5, "combined_pool": "pages_first", "page_layout": "HND"},
        {"q_scale": ((4, 2), "float32"), "k_scale": ((3, 2), "float32"), "v_scale": ((), "float32")},
    ),
    "chunk_soft_cap_negative_scale_dim_192_128": (
        {"chunk_size": 64, "logits_soft_cap": 5.0, "sm_scale": -0.1, "head_dim": 192, "v_head_dim": 128},
        {},
    ),
    "alibi_sinks": ({}, {"alibi_slopes": ((8,), "float32"), "sinks": ((8,), "float32")}),
    "mask": ({}, {"custom_mask": ((500,), "bool")}),
    "mask_alibi_sinks": (
        {},
        {"custom_mask": ((500,), "bool"), "alibi_slopes": ((8,), "float32"), "sinks": ((8,), "float32")},
    ),
    "rope": ({"rope_theta": 1e4}, {}),
    "invariant_dim_80": ({"batch_invariant": True, "head_dim": 80}, {}),
    "fp8": ({}, _FP8),
    "fp8_group_8": ({"num_kv_heads": 1}, {"kv_dtype": "float8_e5m2", "k_scale": ((3, 1), "float32")}),
    "fp8_dim_192_128": ({"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 192, "v_head_dim": 128}, _FP8),
    "fp8_dim_256": ({"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 256}, _FP8),
}


# Each takes seconds; the key of the GPU's record lowers more of them.
_OFTEN = (("window_pages_first_hnd_scales", 1), ("fp8_group_8", 1), ("mask_alibi_sinks", 9))


@pytest.mark.parametrize(
    ("feature", "num_tokens"),
    [
        pytest.param(*facts, marks=() if facts in _OFTEN else pytest.mark.slow)
        for facts in itertools.product(_FEATURES, (1, 9))
    ],
)
def test_mosaic_decode_with_a_feature_lowers_for_cuda(feature, num_tokens):
    fields, options = _FEATURES[feature]
    spec = AttentionSpec(**({"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128} | fields))
    kv_dtype = options.get("kv_dtype", "bfloat16")
    given = {name: jax.ShapeDtypeStruct(*facts) for name, facts in options.items() if name != "kv_dtype"}
    page = (16, spec.num_kv_heads) if spec.page_layout == "NHD" else (spec.num_kv_heads, 16)
    lead = (3, 10, 2) if spec.combined_pool else (3, 10)
    k, v = (jax.ShapeDtypeStruct((*lead, *page, width), kv_dtype) for width in (spec.head_dim, spec.value_dim))
    q = jax.ShapeDtypeStruct((4, num_tokens, spec.num_q_heads, spec.head_dim), "bfloat16")
    ints, table = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4, 6), jnp.int32)

    def decode(q, k, v, table, lens, layer, given):
        v = None if spec.combined_pool else v
        options = AttentionOptions(layer_index=layer, **given)
        return paged.paged_decode(*mosaic_call("paged_decode", (q, k, v, table, lens), options, spec, 16))

    traced = jax.jit(decode).trace(q, k, v, table, ints, jax.ShapeDtypeStruct((), jnp.int32), given)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
