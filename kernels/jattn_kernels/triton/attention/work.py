"""The work lists of attention, made in XLA once a step: which tokens a tile of rows has, and which keys it reads."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jattn_kernels.call import AttentionOptions
from jattn_kernels.lowering.key_bounds import KeyBounds, key_bounds
from jattn_kernels.lowering.split_schedule import DecodeSchedule, split_at_multiples, split_evenly
from jattn_kernels.lowering.token_bounds import token_bounds
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.triton.attention.tile_sizes import AttendTiles


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a step's calls have in common.

    Attributes:
        tiles: Of each work tile its sequence, its first token and how many it has (none: nothing is to be done), the
            first key that is read, the begin and the end of those that all its tokens see whole tiles of, and the end.
        split: Of each work tile which partial result is its own; -1 where it has all keys of its sequence.
        merges: (sequence, first partial result, end) of the sequences that are split; -1 where there are fewer.
        bounds: Of each token.
    """

    tiles: Int[Array, "W 7"]
    split: Int[Array, " W"]
    merges: Int[Array, "most_split 3"] | None
    bounds: KeyBounds


def decode_work(
    seq_lens: Int[Array, " B"],
    options: AttentionOptions,
    spec: AttentionSpec,
    sizes: AttendTiles,
    *,
    num_tokens: int,
    max_keys: int | None,
) -> Work:
    """Each sequence's keys, cut where the GPU's share of all of them ends.

    Args:
        num_tokens: Query tokens a sequence.
        max_keys: No sequence is longer; of `batch_invariant` alone.
    """
    q_start, kv_start = options.starts(seq_lens, num_tokens)
    positions = options.q_positions
    if positions is None:
        positions = q_start[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    masked = options.custom_mask is not None
    bounds = key_bounds(positions, kv_start[:, None], seq_lens[:, None], spec, masked=masked)
    sees = bounds.first < bounds.end
    end = jnp.max(jnp.where(sees, bounds.end, 0), axis=1)
    first = jnp.min(jnp.where(sees, bounds.first, end[:, None]), axis=1)
    facts = {"block_kv": sizes.block_n, "workers": sizes.workers}
    if sizes.tiles_per_split is None:
        schedule = split_evenly(first, end, at_once=sizes.at_once, **facts)
    else:
        assert max_keys is not None
        schedule = split_at_multiples(first, end, tiles_per_split=sizes.tiles_per_split, max_keys=max_keys, **facts)
    return Work(
        tiles=_decode_tiles(schedule, bounds if sizes.whole_tiles and not masked else None, num_tokens),
        split=jnp.where(schedule.work_tiles[:, 3] > 1, _numbers(schedule.work_tiles), -1),
        merges=schedule.split,
        bounds=KeyBounds(*(bound.reshape(-1) for bound in bounds)),
    )


def _numbers(of_tiles: Int[Array, "W ..."]) -> Int[Array, " W"]:
    return jnp.arange(of_tiles.shape[0], dtype=jnp.int32)


def _decode_tiles(schedule: DecodeSchedule, bounds: KeyBounds | None, num_tokens: int) -> Int[Array, "W 7"]:
    """With `bounds`, [B, tokens], tiles that all of a sequence's tokens see are told apart."""
    sequence, first, end, _, end_key = schedule.work_tiles.T
    used, block_kv = _numbers(sequence) < schedule.workers[-1, 1], schedule.block_kv
    begin = first * block_kv
    last = jnp.maximum(jnp.minimum(end * block_kv, end_key), begin)
    tokens = jnp.where(used, num_tokens, 0)
    whole = begin, begin
    if bounds is not None:
        seen_first, seen_end = jnp.max(bounds.first, axis=1)[sequence], jnp.min(bounds.end, axis=1)[sequence]
        whole_begin = jnp.maximum(-(-seen_first // block_kv) * block_kv, begin)
        whole_end = jnp.minimum(seen_end, last) // block_kv * block_kv
        is_none = whole_end <= whole_begin
        whole = jnp.where(is_none, begin, whole_begin), jnp.where(is_none, begin, whole_end)
    return jnp.stack([sequence, sequence * num_tokens, tokens, begin, *whole, last], axis=1)


def extend_work(
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    options: AttentionOptions,
    spec: AttentionSpec,
    sizes: AttendTiles,
    *,
    num_tokens: int,
) -> Work:
    """Tiles of consecutive tokens of a sequence, each with all keys that they see; padded tokens have tiles too."""
    bounds = token_bounds(seq_lens, cu_q_lens, options, spec, num_tokens)
    num_seqs, block = seq_lens.shape[0], sizes.block_tokens
    begins = jnp.minimum(cu_q_lens, num_tokens)  # the last one is the padded tokens'
    lens = jnp.diff(begins, append=num_tokens)
    ends = jnp.cumsum(-(-lens // block), dtype=jnp.int32)
    tile = jnp.arange(-(-num_tokens // block) + num_seqs, dtype=jnp.int32)
    owner = jnp.sum(ends[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(owner, num_seqs)
    done = (tile - jnp.where(sequence == 0, 0, ends[sequence - 1])) * block
    first_token = begins[sequence] + done
    tokens = jnp.where(owner > num_seqs, 0, jnp.clip(lens[sequence] - done, 0, block))
    keys = _tile_keys(bounds, first_token, tokens, sizes, is_masked=options.custom_mask is not None)
    fields = jnp.minimum(sequence, num_seqs - 1), first_token, tokens, *keys
    return Work(tiles=jnp.stack(fields, axis=1), split=jnp.full_like(tile, -1), merges=None, bounds=bounds)


def _tile_keys(
    bounds: KeyBounds, first_token: Int[Array, " W"], tokens: Int[Array, " W"], sizes: AttendTiles, *, is_masked: bool
) -> tuple[Int[Array, " W"], Int[Array, " W"], Int[Array, " W"], Int[Array, " W"]]:
    """The first key, the begin and the end of whole tiles, and the end."""
    within = jnp.arange(sizes.block_tokens, dtype=jnp.int32)[None]
    token = jnp.minimum(first_token[:, None] + within, bounds.end.shape[0] - 1)
    owned = within < tokens[:, None]
    first, end = bounds.first[token], bounds.end[token]
    sees = owned & (first < end)
    far, block_n = jnp.iinfo(jnp.int32).max, sizes.block_n
    last = jnp.max(jnp.where(sees, end, 0), axis=1)
    begin = jnp.minimum(jnp.min(jnp.where(sees, first, far), axis=1), last) // block_n * block_n
    if is_masked:
        return begin, begin, begin, last
    whole_begin = -(-jnp.max(jnp.where(owned, first, 0), axis=1) // block_n) * block_n
    whole_end = jnp.min(jnp.where(owned, jnp.where(sees, end, 0), far), axis=1) // block_n * block_n
    is_none = whole_end <= whole_begin
    return begin, jnp.where(is_none, begin, whole_begin), jnp.where(is_none, begin, whole_end), last
