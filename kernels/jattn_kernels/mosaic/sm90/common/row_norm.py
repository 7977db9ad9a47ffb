"""The norm of a few rows that lie in shared memory as a product's operand."""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles

ROWS, COLUMNS = 8, 128  # of a tile: 16 bytes a thread
_ROWS_OF_WARP, _NUMBERS = ROWS // tiles.WARPS, 8
_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, COLUMNS), (_ROWS_OF_WARP, COLUMNS), (_NUMBERS,))), (-5,), (-3, -2), -1
)


def norm_in_place(x: Any, scale: Any, *, eps: float, offset: float) -> None:
    """Rows over their root mean square, times the scale and an offset; wgmma then sees them.

    Args:
        x: (8, tiles * 128), tiled.
        scale: (tiles, 128).
    """
    count, dtype = scale.shape[0], x.dtype

    def columns(tile):
        return pl.ds(tile * COLUMNS, COLUMNS)

    def load(tile):
        return plgpu.load(x.at[:, columns(tile)], layout=_LAYOUT, optimized=False).astype(jnp.float32)

    def add_squares(tile, squares):
        numbers = load(tile)
        return squares + numbers * numbers

    none = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), _LAYOUT)
    mean = lax.fori_loop(0, count, add_squares, none).sum(axis=1) / (count * COLUMNS)
    inverse = lax.broadcast_in_dim(lax.rsqrt(mean + eps), (ROWS, COLUMNS), [0])

    @pl.loop(0, count)
    def norm_tile(tile):
        factor = plgpu.load(scale.at[tile], layout=_LAYOUT.reduce(0), optimized=False).astype(jnp.float32) + offset
        x[:, columns(tile)] = (load(tile) * inverse * lax.broadcast_in_dim(factor, (ROWS, COLUMNS), [1])).astype(dtype)

    plgpu.commit_smem()
