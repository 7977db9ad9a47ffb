"""Decode calls that extend's kernel does: which ones, and the table's cases of several tokens done by it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.attention import make_schedule, paged_decode
from jattn_kernels.call import Device
from jattn_kernels.lowering.split_schedule import DecodeSchedule
from jattn_kernels.mosaic.sm90 import paged_decode as decode_entry
from jattn_kernels.mosaic.sm90.extend import entry as extend
from jattn_kernels.mosaic.sm90.extend.schedule import ExtendSchedule, choose_extend_tiles
from tests.kernels.harness.case_table import CASES, assert_close, build
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.mosaic_calls import schedule_call
from tests.often import often

SPEC = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))


@pytest.fixture
def small_hopper(hopper, monkeypatch):
    """It is the interpreter, and so small that few rows of few sequences are enough for extend's kernel."""
    monkeypatch.setattr(decode_entry, "num_sms", lambda: 1)
    monkeypatch.setattr(decode_entry, "_MANY_ROWS", 1)
    monkeypatch.setattr(
        extend, "choose_extend_tiles", lambda *facts: dataclasses.replace(choose_extend_tiles(*facts), blocks=2)
    )
    with interpreted():
        yield


@pytest.mark.parametrize(
    ("facts", "batch_size", "num_tokens", "by_extend"),
    [
        ({}, 64, 16, True),
        ({}, 64, 12, True),
        ({}, 64, 11, False),  # 44 rows
        ({}, 64, 1, False),
        ({}, 16, 16, True),  # 128 work tiles: one for nearly every SM
        ({}, 17, 16, False),  # 136: a second round for four of them
        ({}, 8, 16, False),
        ({}, 1, 16, False),
        ({}, 149, 16, True),  # 1192 work tiles in 10 rounds
        ({"batch_invariant": True}, 64, 16, False),
        ({"rope_theta": 1e4}, 64, 16, False),
        ({"num_q_heads": 8}, 64, 48, True),
        ({"num_q_heads": 64}, 64, 33, True),  # three work tiles a head, where decode's kernel has five blocks of rows
        ({"num_kv_heads": 1}, 128, 2, True),
        ({"num_kv_heads": 1, "num_q_heads": 64}, 128, 1, False),  # two work tiles of one head read the keys twice
        ({"num_kv_heads": 1, "num_q_heads": 71}, 128, 4, False),
    ],
    ids=str,
)
def test_extend_gets_calls_of_many_rows_that_fill_the_gpu(hopper, facts, batch_size, num_tokens, by_extend):
    spec = dataclasses.replace(SPEC, **facts)
    wide, narrow = (schedule_call("paged_decode", spec, num_tokens, dtype) for dtype in ("bfloat16", "float8_e4m3fn"))
    assert decode_entry.suits_extend(wide, batch_size, num_tokens) == by_extend
    assert not decode_entry.suits_extend(narrow, batch_size, num_tokens)
    lens = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    schedule = functools.partial(make_schedule, spec=spec, num_tokens=num_tokens, dtype=jnp.bfloat16, page_size=16)
    shapes = jax.eval_shape(functools.partial(schedule, max_seq_len=100), lens)
    assert isinstance(shapes.work, ExtendSchedule if by_extend else DecodeSchedule)


@pytest.mark.parametrize(("num_tokens", "kernel"), [(16, "paged_extend"), (4, "paged_decode")])
def test_calls_and_work_lists_agree_on_the_kernel(hopper, num_tokens, kernel):
    q = jax.ShapeDtypeStruct((64, num_tokens, 32, 128), "bfloat16")
    pages, lens = jax.ShapeDtypeStruct((99, 16, 8, 128), "bfloat16"), jax.ShapeDtypeStruct((64,), jnp.int32)
    table = jax.ShapeDtypeStruct((64, 32), jnp.int32)

    def decode(q, pages, table, lens):
        facts = {"dtype": q.dtype, "page_size": 16}
        schedule = make_schedule(lens, spec=SPEC, num_tokens=num_tokens, **facts)
        return paged_decode(q, pages, pages, table, lens, spec=SPEC, schedule=schedule, return_lse=True)

    traced = jax.jit(decode).trace(q, pages, table, lens)
    assert [result.shape for result in traced.out_info] == [(64, num_tokens, 32, 128), (64, num_tokens, 32)]
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"{kernel}_" in lowered
    assert {"paged_extend": "paged_decode_", "paged_decode": "paged_extend_"}[kernel] not in lowered


def in_kernel_form(case, heads=(4, 2), **fields):
    spec_names = {field.name for field in dataclasses.fields(AttentionSpec)}
    facts = {key: fields.pop(key) for key in spec_names & fields.keys()}
    spec = dataclasses.replace(case.spec, num_q_heads=heads[0], num_kv_heads=heads[1], **{"head_dim": 64, **facts})
    return dataclasses.replace(case, spec=spec, **{"dtype": "bfloat16", **fields})


SEVERAL_TOKENS = {
    case.name.removeprefix("paged_decode_"): in_kernel_form(case)
    for case in CASES
    if case.operation == "paged_decode" and case.q_lens[0] > 1 and case.spec.rope_theta is None
}
EVERYTHING = {"alibi": True, "sinks": True, "q_scale": "rows", "kv_scale": "rows", "num_layers": 2, "layer_index": 1}
SEVERAL_TOKENS |= {
    f"{of}_{name}": dataclasses.replace(in_kernel_form(SEVERAL_TOKENS[of], **fields), name=f"{of}_{name}")
    for of, name, fields in [
        ("verify_kv_start_and_chunk", "and_everything_hnd", {**EVERYTHING, "page_layout": "HND", "heads": (2, 1)}),
        ("verify", "combined_page_256", {"combined_pool": "pages_first", "page_size": 256, "heads": (2, 1)}),
        ("verify", "q_start_float16", {"q_start": (40, 2, 16, 25), "dtype": "float16", "heads": (2, 1)}),
        ("verify", "dim_80", {"head_dim": 80, "heads": (2, 1)}),
        ("verify", "dim_192_128", {"head_dim": 192, "v_head_dim": 128, "heads": (8, 1)}),
        ("verify", "not_causal_split_rows", {"q_lens": (20,) * 4, "causal": False, "heads": (8, 1)}),
    ]
}
OFTEN = ("verify_tree",)


@pytest.mark.parametrize("name", often(SEVERAL_TOKENS, OFTEN))
def test_extends_kernel_agrees_with_the_oracle_of_decode_without_races(small_hopper, name):
    case = SEVERAL_TOKENS[name]
    inputs = build(case)
    lens, num_tokens = inputs.args[4], case.q_lens[0]
    schedule = make_schedule(lens, spec=case.spec, num_tokens=num_tokens, dtype=case.dtype, page_size=case.page_size)
    assert isinstance(schedule.work, ExtendSchedule)
    decode = functools.partial(paged_decode, spec=case.spec, return_lse=True, implementation="mosaic")
    assert_close(case, inputs, *jax.jit(decode)(*inputs.args, **inputs.options, schedule=schedule))
