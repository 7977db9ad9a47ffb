"""Forward passes over rows of the loop state: the batches that a model takes."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.kv_pool import KVPool


def slots(
    pool: KVPool,
    page_table: Int[Array, "B max_pages"],
    owner: Int[Array, " T"],
    positions: Int[Array, " T"],
    written: Bool[Array, " T"],
) -> Int[Array, " T"]:
    """Where each token's key goes: a slot of its owner's pages, or out of range if it is not to be written."""
    page_size = pool.groups[0].page_size
    page = page_table[owner, positions // page_size]
    return jnp.where(written, page * page_size + positions % page_size, pool.groups[0].num_slots)


def owners(cu_q_lens: Int[Array, " B_plus_1"], num_tokens: int) -> tuple[Int[Array, " T"], Bool[Array, " T"]]:
    """The sequence of each token, and whether the token is real: padding is not, and its sequence reads 0."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    is_real = token < cu_q_lens[-1]
    owner = jnp.searchsorted(cu_q_lens[1:], token, side="right").astype(jnp.int32)
    return jnp.where(is_real, owner, 0), is_real


def ragged_pass(
    pool: KVPool,
    page_table: Int[Array, "B max_pages"],
    tokens: Int[Array, " T"],
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    *,
    mode: ForwardMode,
) -> ForwardBatch:
    """Any number of tokens a sequence, the last ones of its `seq_lens`; padding writes nowhere and reads nothing."""
    owner, is_real = owners(cu_q_lens, tokens.shape[0])
    first = (seq_lens - cu_q_lens[1:])[owner]
    positions = jnp.where(is_real, first + jnp.arange(tokens.shape[0], dtype=jnp.int32), 0)
    return ForwardBatch(
        forward_mode=mode,
        input_ids=tokens,
        positions=positions,
        seq_lens=seq_lens,
        cu_q_lens=cu_q_lens,
        out_cache_loc=(slots(pool, page_table, owner, positions, is_real),),
        page_tables=(page_table,),
    )


def decode_pass(
    pool: KVPool,
    page_table: Int[Array, "B max_pages"],
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    live: Bool[Array, " B"],
    *,
    unrolled: bool = False,
) -> ForwardBatch:
    """One token a row. Rows that are not live write nowhere and read nothing.

    Args:
        unrolled: As in ForwardBatch.
    """
    num_rows = tokens.shape[0]
    positions = jnp.where(live, positions, 0)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        input_ids=tokens,
        positions=positions,
        seq_lens=positions + live.astype(jnp.int32),
        cu_q_lens=jnp.arange(num_rows + 1, dtype=jnp.int32),
        out_cache_loc=(slots(pool, page_table, jnp.arange(num_rows, dtype=jnp.int32), positions, live),),
        page_tables=(page_table,),
        unrolled=unrolled,
    )


def verify_pass(
    pool: KVPool,
    page_table: Int[Array, "B max_pages"],
    tokens: Int[Array, "B D"],
    seq_lens: Int[Array, " B"],
    live: Bool[Array, " B"],
) -> ForwardBatch:
    """Several tokens a row, a chain that begins at position `seq_lens`; rows that are not live as in `decode_pass`."""
    num_rows, length = tokens.shape
    seq_lens = jnp.where(live, seq_lens, 0)
    place = jnp.arange(length, dtype=jnp.int32)[None]
    positions = jnp.where(live[:, None], seq_lens[:, None] + place, 0).reshape(-1)
    owner = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), length)
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        input_ids=tokens.reshape(-1),
        positions=positions,
        seq_lens=seq_lens,
        cu_q_lens=jnp.arange(num_rows + 1, dtype=jnp.int32) * length,
        out_cache_loc=(slots(pool, page_table, owner, positions, live[owner]),),
        page_tables=(page_table,),
    )
