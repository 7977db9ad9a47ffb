"""An implementation of another package serves beside the library's own, which knows nothing of it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec, make_schedule, paged_decode, rms_norm, rotate_and_write
from jattn_kernels.call import AttentionCall
from jattn_kernels.dispatch import choose, implementations, register, works_per_sequence
from jattn_kernels.xla import XLA

SPEC = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8)


def _told(call, operands):
    print(f"loud: {call.operation}")
    return XLA.run(call, operands)


def _lengths(call, seq_lens, cu_q_lens, max_seq_len):
    print(f"loud: schedule of {call.operation} for {call.num_seqs}")
    return seq_lens


LOUD = dataclasses.replace(
    XLA, name="loud", run=_told, make_schedule=_lengths, per_sequence_work=frozenset({"paged_decode"})
)


def decoded(**options):
    pages = jnp.arange(64.0).reshape(2, 4, 1, 8)
    arrays = jnp.ones((1, 1, 2, 8)), pages, pages, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    return paged_decode(*arrays, spec=SPEC, **options)


def written(**options):
    pages, angles = jnp.zeros((2, 4, 1, 8)), jnp.ones((1, 4))
    arrays = jnp.ones((1, 4, 8)), angles, angles, pages, pages, jnp.zeros(1, jnp.int32)
    return rotate_and_write(*arrays, num_kv_heads=1, **options)


def scheduled(**options):
    facts = {"num_tokens": 1, "dtype": "float32", "page_size": 4}
    return make_schedule(jnp.ones(1, jnp.int32), spec=SPEC, **facts, **options)


def normed(**options):
    return rms_norm(jnp.ones((2, 8)), jnp.ones(8), eps=1e-5, **options)


def test_a_registered_implementation_serves_every_kind_of_call(capsys):
    with register(LOUD, before="xla"):
        assert [entry.name for entry in implementations()] == ["mosaic", "triton", "loud", "xla"]
        schedule = scheduled()
        np.testing.assert_array_equal(decoded(schedule=schedule), decoded(implementation="xla"))
        np.testing.assert_array_equal(normed(), normed(implementation="xla"))
        for mine, theirs in zip(written(), written(implementation="xla"), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        with pytest.raises(ValueError, match="Got one of 'loud', the call is served by 'xla'"):
            decoded(schedule=schedule, implementation="xla")
    said = ["schedule of paged_decode for 1", "paged_decode", "rms_norm", "rotate_and_write"]
    assert capsys.readouterr().out.splitlines() == [f"loud: {line}" for line in said]
    assert "loud" not in [entry.name for entry in implementations()]
    assert scheduled() is None


def test_an_implementation_that_comes_last_serves_what_asks_for_it(capsys):
    registration = register(LOUD)
    try:
        normed()
        assert capsys.readouterr().out == ""
        normed(implementation="loud")
        assert capsys.readouterr().out == "loud: rms_norm\n"
        call = AttentionCall(operation="paged_decode", spec=SPEC, q_dtype="float32", kv_dtype="float32", page_size=4)
        assert choose(call, "loud").implementation is LOUD
    finally:
        registration.close()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"before": "cuda"}, "`before` must be None or one of: mosaic, triton, xla"),
        ({"name": "xla"}, "a name of its own"),
    ],
)
def test_register_says_what_is_wrong(given, sentence):
    implementation = dataclasses.replace(LOUD, name=given.pop("name", "loud"))
    with pytest.raises(ValueError, match=sentence):
        register(implementation, **given)


def test_an_implementation_says_itself_where_it_works_per_sequence():
    facts = {"spec": SPEC, "dtype": "float32", "page_size": 4}
    assert not works_per_sequence("paged_decode", **facts)
    with register(LOUD, before="xla"):
        assert works_per_sequence("paged_decode", **facts)
        assert not works_per_sequence("paged_extend", **facts)
        assert not works_per_sequence("paged_decode", **facts, implementation="xla")
