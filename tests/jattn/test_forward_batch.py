"""ForwardMode's predicates mean what SGLang's mean."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from jattn.forward_batch import ForwardBatch, ForwardMode, HostBatch

EVERY_EXTEND = {"EXTEND", "MIXED", "DRAFT_EXTEND", "TARGET_VERIFY"}


@pytest.mark.parametrize(
    ("predicate", "modes"),
    [
        ("is_decode", {"DECODE"}),
        ("is_idle", {"IDLE"}),
        ("is_decode_or_idle", {"DECODE", "IDLE"}),
        ("is_mixed", {"MIXED"}),
        ("is_target_verify", {"TARGET_VERIFY"}),
        ("is_draft_extend", {"DRAFT_EXTEND"}),
        ("is_extend", EVERY_EXTEND),
        ("is_extend_or_draft_extend_or_mixed", EVERY_EXTEND - {"TARGET_VERIFY"}),
    ],
)
def test_predicate_holds_for_the_modes_of_sglang(predicate, modes):
    assert {mode.name for mode in ForwardMode if getattr(mode, predicate)()} == modes


def batch(mode):
    tokens = jnp.arange(5, dtype=jnp.int32)
    return ForwardBatch(
        forward_mode=mode,
        input_ids=tokens,
        positions=tokens,
        seq_lens=jnp.array([3, 2], jnp.int32),
        cu_q_lens=jnp.array([0, 3, 5], jnp.int32),
        out_cache_loc=(tokens,),
        page_tables=(jnp.zeros((2, 4), jnp.int32),),
    )


def test_batch_counts_sequences_not_tokens():
    assert batch(ForwardMode.EXTEND).batch_size == 2


def test_batch_mode_is_static():
    traces = []

    @jax.jit
    def total(b):
        traces.append(b.forward_mode)
        return b.input_ids.sum()

    chex.assert_trees_all_equal(total(batch(ForwardMode.EXTEND)), jnp.int32(10))
    total(batch(ForwardMode.EXTEND))
    total(batch(ForwardMode.MIXED))
    assert traces == [ForwardMode.EXTEND, ForwardMode.MIXED]


def test_lengths_of_an_extend_are_those_of_its_offsets():
    extend = batch(ForwardMode.EXTEND)
    extend = dataclasses.replace(extend, cu_q_lens=jnp.array([0, 1, 3], jnp.int32))
    assert extend.extend_seq_lens.tolist() == [1, 2]
    assert extend.extend_prefix_lens.tolist() == [2, 0]
    assert int(extend.seq_lens_sum) == 5


@pytest.mark.parametrize("encoder_lens", [None, jnp.array([4, 0], jnp.int32)])
def test_host_batch_copies_the_lengths(encoder_lens):
    host = HostBatch.of(dataclasses.replace(batch(ForwardMode.EXTEND), encoder_lens=encoder_lens))
    assert host.seq_lens_cpu.tolist() == [3, 2]
    assert host.extend_seq_lens_cpu.tolist() == [3, 2]
    assert host.extend_prefix_lens_cpu.tolist() == [0, 0]
    assert host.seq_lens_sum == 5
    assert (host.encoder_lens_cpu is None) == (encoder_lens is None)
    with pytest.raises(TypeError, match="HostBatch"):
        jax.jit(lambda batch: batch)(host)
