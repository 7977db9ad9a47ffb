"""Which keys a tile of queries sees, and the range of keys that it must read."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jattn_kernels.spec import AttentionSpec
from jattn_kernels.xla.tiles import QueryTiles


class TileKeys(NamedTuple):
    """The keys of each tile's request.

    Attributes:
        kv_len: Number of keys.
        kv_start: Absolute position of the first key.
        mask_start: Where the request's rows start in `custom_mask`.
        custom_mask: Replaces the causal rule; None if there is none.
    """

    kv_len: Int[Array, " W"]
    kv_start: Int[Array, " W"]
    mask_start: Int[Array, " W"]
    custom_mask: Bool[Array, " M"] | None


def tile_keys(
    tiles: QueryTiles,
    q_lens: Int[Array, " B"],
    kv_lens: Int[Array, " B"],
    kv_start: Int[Array, " B"],
    custom_mask: Bool[Array, " M"] | None,
) -> TileKeys:
    """The keys of each tile, from those of each request."""
    if custom_mask is not None and custom_mask.shape[0] == 0:
        custom_mask = jnp.zeros(1, bool)  # nothing can be gathered from no entry
    sizes = q_lens * kv_lens
    mask_start = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    return TileKeys(kv_lens[tiles.request], kv_start[tiles.request], mask_start[tiles.request], custom_mask)


def visible(tiles: QueryTiles, keys: TileKeys, key: Int[Array, "W S"], spec: AttentionSpec) -> Bool[Array, "W R S"]:
    """Whether each row sees each key, keys named by their number in the request's table."""
    # Windows are held against distances: a position plus or minus a window may overflow.
    p = tiles.position[:, :, None]
    j = (keys.kv_start[:, None] + key)[:, None]
    seen = tiles.valid[:, :, None] & (key < keys.kv_len[:, None])[:, None]
    if keys.custom_mask is not None:
        bit = (keys.mask_start[:, None] + tiles.row * keys.kv_len[:, None])[:, :, None] + key[:, None]
        seen &= keys.custom_mask.at[bit].get(mode="fill", fill_value=False)
    elif spec.causal:
        seen &= j <= p
    if spec.window_left is not None:
        seen &= p - j <= spec.window_left
    if spec.window_right is not None:
        seen &= j - p <= spec.window_right
    if spec.chunk_size is not None:
        seen &= j // spec.chunk_size == p // spec.chunk_size
    return seen


def key_range(tiles: QueryTiles, keys: TileKeys, spec: AttentionSpec) -> tuple[Int[Array, " W"], Int[Array, " W"]]:
    """Numbers (first, end) of the keys that some row of a tile may see; end <= first if there are none."""
    info = jnp.iinfo(jnp.int32)
    top = jnp.max(tiles.position, axis=1, where=tiles.valid, initial=info.min)
    low = jnp.min(tiles.position, axis=1, where=tiles.valid, initial=info.max)
    live = jnp.any(tiles.valid, axis=1)
    top, low = jnp.where(live, top, 0) - keys.kv_start, jnp.where(live, low, 0) - keys.kv_start
    # Cut to where the keys are, so that nothing below overflows, however large a window or a chunk is.
    last, low = keys.kv_len - 1, jnp.maximum(low, 0)
    top = jnp.minimum(top, last)
    first, beyond_top = jnp.zeros_like(low), last - top
    if spec.causal and keys.custom_mask is None:
        beyond_top = jnp.zeros_like(top)
    if spec.window_right is not None:
        beyond_top = jnp.minimum(beyond_top, spec.window_right)
    if spec.window_left is not None:
        first = jnp.maximum(first, low - spec.window_left)
    if spec.chunk_size is not None:
        first = jnp.maximum(first, low - (low + keys.kv_start) % spec.chunk_size)
        beyond_top = jnp.minimum(beyond_top, spec.chunk_size - 1 - (top + keys.kv_start) % spec.chunk_size)
    return first, jnp.where(live, top + 1 + beyond_top, 0)
