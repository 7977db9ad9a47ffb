"""A work list that is given must be one for the call: its kernel would read what is not there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jattn_kernels
from jattn_kernels import AttentionSpec, attention, make_schedule
from jattn_kernels.call import Device

_OF_ANOTHER_CALL = {
    "batch": {"batch": 2},
    "tokens": {"num_tokens": 64},
    "window": {"spec": {"window_left": 5}},
    "heads": {"spec": {"num_q_heads": 40, "num_kv_heads": 4}},
    "causal": {"spec": {"causal": False}},
    "keys": {"kv_dtype": "float8_e4m3fn", "spec": {"head_dim": 256}},
}


@pytest.mark.parametrize("other", [*_OF_ANOTHER_CALL, "no list", None])
@pytest.mark.parametrize("operation", ["paged_decode", "paged_extend"])
def test_faces_refuse_a_work_list_of_another_call(monkeypatch, operation, other):
    monkeypatch.setattr(attention, "default_device", lambda: Device("gpu", (9, 0)))
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64)
    extends = operation == "paged_extend"

    def made(batch=4, num_tokens=101 if extends else 3, spec=spec, **facts):
        spec = dataclasses.replace(AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64), **spec)
        lens, offsets = jnp.ones(batch, jnp.int32), jnp.arange(batch + 1, dtype=jnp.int32)
        facts = {"spec": spec, "num_tokens": num_tokens, "dtype": "bfloat16", "page_size": 16} | facts
        return make_schedule(lens, offsets if extends else None, **facts)

    def call(schedule):
        q = jnp.zeros((101, 4, 64) if extends else (4, 3, 4, 64), jnp.bfloat16)
        pages, table, lens = (
            jnp.zeros((9, 16, 2, 64), jnp.bfloat16),
            jnp.zeros((4, 6), jnp.int32),
            jnp.ones(4, jnp.int32),
        )
        offsets = [jnp.arange(5, dtype=jnp.int32)] if extends else []
        face = functools.partial(getattr(jattn_kernels, operation), spec=spec, schedule=schedule)
        return jax.eval_shape(face, q, pages, pages, table, lens, *offsets)

    if other is None:
        assert call(made(spec={})).shape == ((101, 4, 64) if extends else (4, 3, 4, 64))
        return
    schedule = 3 if other == "no list" else made(**({"spec": {}} | _OF_ANOTHER_CALL[other]))
    with pytest.raises(ValueError, match="`schedule` must be what `make_schedule` makes"):
        call(schedule)
