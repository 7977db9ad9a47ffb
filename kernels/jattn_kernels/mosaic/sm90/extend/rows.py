"""Extend's rows, in XLA: what is known of query tokens, in the order in which the kernel's tiles have their rows.

A warpgroup's tile has 64 rows: for each of its heads the tile's tokens, one after the other.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jattn_kernels.lowering.key_bounds import KeyBounds
from jattn_kernels.lowering.token_bounds import owners
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS

CONSUMER_WARPGROUPS = 2  # that compute: a query block's tiles
_BITS = 32  # of a mask's word


class RowBounds(NamedTuple):
    """What the rows of each query block's tiles see, where it is not told by the number of the row.

    Attributes:
        first, end, position: Of each row, as in `KeyBounds`.
        ranges: Tiles of keys, of each tile of rows: the first that some row sees, the first and the end of those that
            all rows see whole, and the end of all.
    """

    first: Int[Array, "W tiles rows"]
    end: Int[Array, "W tiles rows"]
    position: Int[Array, "W tiles rows"]
    ranges: Int[Array, "W tiles 4"]


class KeyRanges(NamedTuple):
    """Tiles of keys that rows see.

    Attributes:
        first, end: Of each query block.
        tiles: As `RowBounds.ranges`.
    """

    first: Int[Array, " W"]
    end: Int[Array, " W"]
    tiles: Int[Array, "W tiles 4"]


def key_ranges(
    bounds: KeyBounds, first_token: Int[Array, " W"], tokens: Int[Array, " W"], *, block_tokens: int, block_kv: int
) -> KeyRanges:
    """The tiles of keys that query blocks of consecutive tokens see; none of them begins at 0 and ends there.

    Args:
        bounds: Of each token.
    """
    token = _tokens_of_tiles(first_token, block_tokens)
    owned = token < (first_token + tokens)[:, None, None]
    first, end = bounds.first[token], bounds.end[token]
    sees = owned & (first < end)
    far = jnp.iinfo(jnp.int32).max // block_kv
    begins = jnp.min(jnp.where(sees, first // block_kv, far), axis=2)
    ends = jnp.max(jnp.where(sees, -(-end // block_kv), 0), axis=2)
    whole_from = jnp.max(jnp.where(owned, -(-first // block_kv), 0), axis=2)
    whole_to = jnp.min(jnp.where(owned, jnp.where(sees, end // block_kv, 0), far), axis=2)

    item_end = jnp.max(ends, axis=1)
    item_first = jnp.minimum(jnp.min(begins, axis=1), item_end)
    nothing = ends == 0
    begins = jnp.where(nothing, item_first[:, None], begins)
    ends = jnp.where(nothing, item_first[:, None], ends)
    whole_from = jnp.clip(whole_from, begins, ends)
    whole_to = jnp.clip(whole_to, whole_from, ends)
    return KeyRanges(item_first, item_end, jnp.stack([begins, whole_from, whole_to, ends], axis=2))


def of_rows(
    of_tokens: Shaped[Array, "*lists T"], first_token: Int[Array, " W"], *, block_tokens: int, heads: int
) -> Shaped[Array, "*lists W tiles rows"]:
    """Numbers of tokens, for each row of the tiles; rows of no token get another's.

    Args:
        heads: Heads that share a tile.
    """
    by_tile = jnp.concatenate([of_tokens[..., _tokens_of_tiles(first_token, block_tokens)]] * heads, axis=-1)
    missing = WGMMA_ROWS - by_tile.shape[-1]
    return jnp.pad(by_tile, [(0, 0)] * (by_tile.ndim - 1) + [(0, missing)])


def mask_words_by_token(
    custom_mask: Bool[Array, " M"],
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    *,
    num_tokens: int,
    num_keys: int,
    leading_rows: Int[Array, " B"] | None = None,
) -> Int[Array, "words T"]:
    """Of each token a bit for each key, 32 keys a word; masks are [q_len, seq_len] row-major, one after the other.

    Args:
        num_keys: Keys a sequence at most, leading rows included; a multiple of 32.
        leading_rows: As in `token_bounds`.
    """
    if custom_mask.shape[0] == 0:
        custom_mask = jnp.zeros(1, bool)  # nothing can be gathered from no entry
    sizes = seq_lens * jnp.diff(cu_q_lens)
    start = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    owner = owners(cu_q_lens, num_tokens)
    sequence = jnp.minimum(owner, seq_lens.shape[0] - 1)
    kv_len = jnp.where(owner < seq_lens.shape[0], seq_lens[sequence], 0)
    row = jnp.arange(num_tokens, dtype=jnp.int32) - cu_q_lens[sequence]
    key = jnp.arange(num_keys, dtype=jnp.int32).reshape(-1, 1, _BITS)
    if leading_rows is not None:
        key = key - leading_rows[sequence][None, :, None]
    entry = (start[sequence] + row * kv_len)[None, :, None] + key
    owned = (key >= 0) & (key < kv_len[None, :, None])
    seen = custom_mask.at[jnp.maximum(entry, 0)].get(mode="fill", fill_value=False) & owned
    bit = jnp.arange(_BITS, dtype=jnp.int32)[None, None]
    return jnp.sum(seen.astype(jnp.int32) << bit, axis=2, dtype=jnp.int32)


def aligned(cu_kv_lens: Int[Array, " B_plus_1"], num_rows: int) -> tuple[Int[Array, " B_plus_1"], Int[Array, " rows"]]:
    """Where sequences' keys begin if each one does at a multiple of 8 rows, and which row, if any, goes to each place.

    Tiles begin at such rows: where a sequence lies in its batch then does not tell which of its keys share a tile.
    """
    lens = jnp.diff(cu_kv_lens)
    starts = jnp.pad(jnp.cumsum(lens + -lens % TILED_ROWS, dtype=jnp.int32), (1, 0))
    place = jnp.arange(num_rows + lens.shape[0] * (TILED_ROWS - 1), dtype=jnp.int32)
    owner = jnp.minimum(owners(starts, place.shape[0]), lens.shape[0] - 1)
    return starts, cu_kv_lens[owner] + place - starts[owner]


def _tokens_of_tiles(first_token: Int[Array, " W"], block_tokens: int) -> Int[Array, "W tiles tokens"]:
    """The tokens of each query block's tiles, and some that they do not have; gathers clamp those past the end."""
    within = jnp.arange(block_tokens, dtype=jnp.int32).reshape(1, CONSUMER_WARPGROUPS, -1)
    return first_token[:, None, None] + within
