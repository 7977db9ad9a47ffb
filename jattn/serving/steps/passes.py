"""Forward passes over rows of the loop state: the batches that a model takes."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.kv_pool import KVGroup, KVPool
from jattn.page_lists import ALL_KEYS


def places(
    pool: KVPool,
    page_tables: Sequence[Int[Array, "B max_pages"]],
    first: Int[Array, " B"],
    owner: Int[Array, " T"],
    positions: Int[Array, " T"],
    written: Bool[Array, " T"],
) -> dict[str, Any]:
    """Where a batch's keys are, as a ForwardBatch says it: pages of each sequence, and the slot of each token.

    Args:
        page_tables: Of the pool's page lists. In the place of pages that no query of this pass sees, which are another
            sequence's by now or nobody's, page 0 is read.
        first: Position of each sequence's first query.
        written: Whether the token's key is to be written; if not its slot is out of range.
    """
    column = jnp.arange(page_tables[0].shape[1], dtype=jnp.int32)[None]

    def seen(group: KVGroup):
        table = page_tables[group.page_list]
        if group.span == ALL_KEYS:
            return table
        return jnp.where(column < group.span.first_page(first, group.page_size)[:, None], 0, table)

    def slots(group: KVGroup):
        page = page_tables[group.page_list][owner, positions // group.page_size]
        return jnp.where(written, page * group.page_size + positions % group.page_size, group.num_slots)

    return {"page_tables": tuple(map(seen, pool.groups)), "out_cache_loc": tuple(map(slots, pool.groups))}


def owners(cu_q_lens: Int[Array, " B_plus_1"], num_tokens: int) -> tuple[Int[Array, " T"], Bool[Array, " T"]]:
    """The sequence of each token, and whether the token is real: padding is not, and its sequence reads 0."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    is_real = token < cu_q_lens[-1]
    owner = jnp.searchsorted(cu_q_lens[1:], token, side="right").astype(jnp.int32)
    return jnp.where(is_real, owner, 0), is_real


def ragged_pass(
    pool: KVPool,
    page_tables: Sequence[Int[Array, "B max_pages"]],
    tokens: Int[Array, " T"],
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    *,
    mode: ForwardMode,
) -> ForwardBatch:
    """Any number of tokens a sequence, the last ones of its `seq_lens`; padding writes nowhere and reads nothing."""
    owner, is_real = owners(cu_q_lens, tokens.shape[0])
    before = seq_lens - cu_q_lens[1:]
    positions = jnp.where(is_real, before[owner] + jnp.arange(tokens.shape[0], dtype=jnp.int32), 0)
    return ForwardBatch(
        forward_mode=mode,
        input_ids=tokens,
        positions=positions,
        seq_lens=seq_lens,
        cu_q_lens=cu_q_lens,
        **places(pool, page_tables, before + cu_q_lens[:-1], owner, positions, is_real),
    )


def decode_pass(
    pool: KVPool,
    page_tables: Sequence[Int[Array, "B max_pages"]],
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
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    positions = jnp.where(live, positions, 0)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        input_ids=tokens,
        positions=positions,
        seq_lens=positions + live.astype(jnp.int32),
        cu_q_lens=jnp.arange(tokens.shape[0] + 1, dtype=jnp.int32),
        **places(pool, page_tables, positions, rows, positions, live),
        unrolled=unrolled,
    )


def verify_pass(
    pool: KVPool,
    page_tables: Sequence[Int[Array, "B max_pages"]],
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
        **places(pool, page_tables, seq_lens, owner, positions, live[owner]),
    )
