"""ForwardMode's predicates mean what SGLang's mean."""

import chex
import jax
import jax.numpy as jnp
import pytest

from jattn.forward_batch import ForwardBatch, ForwardMode

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
