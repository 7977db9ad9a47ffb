"""Hopper's kernels of absorbed MLA on the CPU: against the oracle under the interpreter, and what serves which call."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec, make_schedule, mla_decode, mla_extend
from jattn_kernels.call import Device
from jattn_kernels.lowering.split_schedule import DecodeSchedule
from jattn_kernels.mosaic.sm90 import mla_decode as decode_entry
from jattn_kernels.mosaic.sm90 import mla_extend as extend_entry
from jattn_kernels.mosaic.sm90.common.merge_splits import SplitResults, merge_splits
from jattn_kernels.mosaic.sm90.decode import split_kv
from tests.kernels.harness.case_table import Case, assert_close, build
from tests.kernels.harness.interpreter import interpreted
from tests.often import often

# Narrower than DeepSeek's, as the interpreter takes its time.
FACTS = {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 192, "v_head_dim": 128, "sm_scale": 0.1}


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU of three SMs; the interpreter is it."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    for module in (split_kv, decode_entry, extend_entry):
        monkeypatch.setattr(module, "num_sms", lambda: 3)
    with interpreted():
        yield


def case(name, *, heads=16, q_len=1, kv_lens=(13, 1, 0, 70), page_size=16, dtype="bfloat16", spec=None, **fields):
    return Case(
        name=name,
        operation="mla_decode",
        spec=AttentionSpec(**FACTS | {"num_q_heads": heads} | (spec or {})),
        q_lens=(q_len,) * len(kv_lens),
        kv_lens=kv_lens,
        page_size=page_size,
        dtype=dtype,
        **fields,
    )


FP8 = {"kv_dtype": "float8_e4m3fn"}
FP8_LAYERS = {**FP8, "kv_scale": "rows", "num_layers": 2, "layer_index": 1, "page_size": 64}
INTERPRETED = [
    case("fp8_few_rows", heads=8, kv_lens=(70, 3), kv_dtype="float8_e4m3fn"),
    case("few_rows_layers", num_layers=2, layer_index=1, kv_lens=(70, 3), page_size=64),
    case("verify_window", heads=32, q_len=2, kv_lens=(270, 65), kv_start=(5, 0), spec={"window_left": 40}),
    case("negative_scale", heads=32, kv_lens=(70, 3), page_size=64, spec={"sm_scale": -0.1}),
    case("fp8_verify_window", heads=32, q_len=2, kv_lens=(270, 65), spec={"window_left": 40}, **FP8_LAYERS),
    case("blocks_of_rows_split", heads=128, kv_lens=(300, 0), dtype="float16", padding_rows=1),
]
PACKED = {"kv_dtype": "uint8", "spec": {"head_dim": 576, "v_head_dim": 512}}
INTERPRETED.append(case("packed", heads=8, kv_lens=(70, 0), **PACKED, num_layers=2, layer_index=1))
SLOW = [
    case("packed_few_rows_split", kv_lens=(600, 3, 0), page_size=64, **PACKED, padding_rows=1),
    case("packed_split", heads=20, kv_lens=(600, 3), page_size=64, **PACKED, padding_rows=1),
    case("packed_mask", q_len=6, kv_lens=(70, 6), tree=(-1, 0, 0, 1, 1, -1), **PACKED),
    case("fp8", kv_lens=(270, 1, 0, 70), kv_dtype="float8_e4m3fn", kv_scale="scalar", padding_rows=1),
    case("fp8_window_layers", heads=8, q_len=2, kv_lens=(130, 9), spec={"window_left": 40}, **FP8_LAYERS),
    case("fp8_whole_widths", kv_lens=(200,), **FP8, spec={"head_dim": 576, "v_head_dim": 512}),
    case("fp8_blocks_of_rows", heads=128, kv_lens=(300, 0, 9), kv_dtype="float8_e4m3fn", kv_scale="scalar"),
    case("fp8_many_rows_whole_widths", heads=64, kv_lens=(200,), **FP8, spec={"head_dim": 576, "v_head_dim": 512}),
    case("few_rows", kv_lens=(13, 1, 0, 70, 600)),
    case("few_rows_two_tokens", heads=8, q_len=2, kv_lens=(130, 9)),
    case("whole_widths", heads=64, kv_lens=(200,), spec={"head_dim": 576, "v_head_dim": 512}),
    case("rows_padded", heads=20, kv_lens=(130, 9, 3), page_size=32),
    case("tree", q_len=6, kv_lens=(70, 6), tree=(-1, 0, 0, 1, 1, -1)),
    case("scales_sinks_cap", heads=64, kv_lens=(150, 9), sinks=True, q_scale="rows", spec={"logits_soft_cap": 5.0}),
    case("invariant", heads=64, kv_lens=(1100, 9, 0), spec={"batch_invariant": True}),
    case("alibi", heads=32, kv_lens=(70, 9), alibi=True),
]


def extend_case(name, *, q_lens, **fields):
    lens = {"q_len": 1, "kv_lens": (0,) * len(q_lens)}
    return dataclasses.replace(case(name, **lens | fields), operation="mla_extend", q_lens=q_lens)


# Sequences of no group, of one that is not full, of several; groups that are split, and as many that are not.
EXTENDED = [
    extend_case("extend", q_lens=(5, 0, 1), kv_lens=(300, 7, 70), padding_rows=1, padding_tokens=3),
    extend_case("extend_fp8", q_lens=(5, 1), kv_lens=(140, 70), heads=20, page_size=32, **FP8, kv_scale="scalar"),
    extend_case("extend_window", q_lens=(6, 2), kv_lens=(70, 3), heads=32, spec={"window_left": 40}, kv_start=(5, 0)),
]
SLOW_EXTENDED = [
    extend_case("extend_layers", q_lens=(3, 9), kv_lens=(150, 9), page_size=64, num_layers=2, layer_index=1),
    extend_case("extend_blocks_of_rows", q_lens=(2, 1), kv_lens=(140, 70), heads=128, dtype="float16"),
    extend_case("extend_scales", q_lens=(5, 3), kv_lens=(70, 9), heads=20, sinks=True, q_scale="rows", page_size=32),
    extend_case("extend_packed", q_lens=(5, 1), kv_lens=(140, 70), heads=20, page_size=32, **PACKED),
    extend_case("extend_positions", q_lens=(5, 3), kv_lens=(270, 9), q_positions=True),
    extend_case("extend_invariant", q_lens=(5, 0, 3), kv_lens=(600, 9, 70), spec={"batch_invariant": True}),
    extend_case("extend_more_queries_than_keys", q_lens=(6, 3), kv_lens=(2, 0)),
    extend_case(
        "extend_whole_widths", q_lens=(3,), kv_lens=(150,), heads=64, spec={"head_dim": 576, "v_head_dim": 512}
    ),
]


def attend(case, inputs):
    face = mla_decode if case.is_decode else mla_extend
    given = functools.partial(face, spec=case.spec, return_lse=True, implementation="mosaic")
    return jax.jit(given)(*inputs.args, **inputs.options)


# Each kernel, each dtype of latents; what the other interpreted ones have is in these too.
OFTEN = ("few_rows_layers", "fp8_verify_window", "blocks_of_rows_split", "packed", "extend")


@pytest.mark.parametrize(
    "case",
    often(
        [*INTERPRETED, *EXTENDED, *SLOW, *SLOW_EXTENDED],
        [case for case in (*INTERPRETED, *EXTENDED) if case.name in OFTEN],
    ),
    ids=lambda case: case.name,
)
def test_mosaic_latent_attention_agrees_with_the_oracle_without_races(hopper, case):
    inputs = build(case)
    assert_close(case, inputs, *attend(case, inputs))


@pytest.mark.parametrize(("heads", "block_kv"), [(16, 64), (17, 128), (128, 128)])
def test_a_given_schedule_is_that_of_the_kernel_that_serves_the_call(monkeypatch, heads, block_kv):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    spec = AttentionSpec(num_q_heads=heads, num_kv_heads=1, head_dim=576, v_head_dim=512, sm_scale=0.1)
    facts = {"spec": spec, "num_tokens": 1, "dtype": "bfloat16", "page_size": 64, "implementation": "mosaic"}
    make = functools.partial(make_schedule, operation="mla_decode", max_seq_len=4096, **facts)
    made = jax.eval_shape(make, jax.ShapeDtypeStruct((4,), jnp.int32))
    (schedule,) = jax.tree.leaves(made, is_leaf=lambda leaf: isinstance(leaf, DecodeSchedule))
    assert schedule.block_kv == block_kv


@pytest.mark.parametrize(("ctx", "parts"), [(8192, 32), (4096, 32), (2048, 16), (16384, 64)])
def test_a_lone_sequence_of_128_heads_is_cut_to_single_pairs_only_where_there_are_few(monkeypatch, ctx, parts):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    spec = AttentionSpec(num_q_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512, sm_scale=0.1)
    facts = {"spec": spec, "num_tokens": 1, "dtype": "bfloat16", "page_size": 64, "implementation": "mosaic"}
    made = make_schedule(jnp.array([ctx], jnp.int32), operation="mla_decode", max_seq_len=ctx, **facts)
    (schedule,) = jax.tree.leaves(made, is_leaf=lambda leaf: isinstance(leaf, DecodeSchedule))
    assert int(schedule.work_tiles[0, 3]) == parts


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kv_dtype": "float8_e5m2"}, "`mosaic` does not take bfloat16 queries and float8_e5m2 latents"),
        (
            {"kv_dtype": "float8_e4m3fn", "heads": 32, "alibi": True},
            "does `alibi_slopes` of at most 16 rows of queries .* fp8 latents, not 32",
        ),
        ({"spec": {"head_dim": 176}}, "`mosaic` takes latents of a multiple of 128 numbers up to 512, and 64 rotated"),
        ({"heads": 32, "spec": {"head_dim": 256, "v_head_dim": 192}}, "takes latents of a multiple of 128 .*, not 192"),
        ({"page_size": 8}, "`mosaic` takes page_size 16, 32, 64, 128 in mla_decode, not 8"),
        ({"dtype": "float32"}, "`mosaic` does not take float32 queries and float32 latents"),
    ],
)
def test_what_mosaic_has_no_latent_kernel_for_is_refused(monkeypatch, fields, sentence):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    refused = case("refused", **fields)
    with pytest.raises(NotImplementedError, match=sentence):
        attend(refused, build(refused))


@pytest.mark.parametrize(("num_seqs", "num_rows", "num_sms"), [(1, 8, 132), (1, 64, 132), (3, 8, 132), (5, 8, 1)])
def test_splits_of_wide_rows_are_merged(monkeypatch, num_seqs, num_rows, num_sms):
    """A lone sequence's few rows are cut into several blocks; where SMs are few a block has several sequences."""
    monkeypatch.setattr("jattn_kernels.mosaic.sm90.common.tiles.num_sms", lambda: num_sms)
    width, splits = 512, 2 * num_seqs
    random = np.random.default_rng(0)
    outs = random.standard_normal((splits, 1, num_rows, width)).astype(np.float32)
    lses = random.standard_normal((splits, 1, num_rows)).astype(np.float32)
    nothing = np.zeros((num_seqs, 1, num_rows, width), np.float32)
    first = np.arange(num_seqs, dtype=np.int32)
    schedule = DecodeSchedule(
        work_tiles=np.zeros((splits, 5), np.int32),
        workers=np.zeros((1, 7), np.int32),
        split=np.stack([first, 2 * first, 2 * first + 2], axis=1),
        block_kv=64,
    )
    with interpreted():
        merge = functools.partial(merge_splits, schedule=schedule, batch_invariant=False)
        out, lse = jax.jit(merge)(SplitResults(nothing, nothing[..., 0], outs, lses))
    weights = np.exp(lses.astype(np.float64)).reshape(num_seqs, 2, 1, num_rows)
    parts = outs.reshape(num_seqs, 2, 1, num_rows, width)
    expected = (parts * weights[..., None]).sum(axis=1) / weights.sum(axis=1)[..., None]
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse, np.log(weights.sum(axis=1)), rtol=1e-5, atol=1e-6)
