"""The norm of a few rows that lie in shared memory as a product's operand."""

from typing import Any

import jax
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


def clear_last(x: Any) -> None:
    """The last 128 columns of rows in shared memory, (8, tiles * 128), become 0."""
    none = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), x.dtype), _LAYOUT)
    x[:, pl.ds(x.shape[1] - COLUMNS, COLUMNS)] = none


def norm_in_place(x: Any, scale: Any, *, columns: int, eps: float, offset: float) -> None:
    """Rows over their root mean square, times the scale and an offset; wgmma then sees them.

    Args:
        x: (8, tiles * 128), tiled; 0 past a row's last number, and stays so.
        scale: (tiles, 128), or (tiles * 2, 64), where what is past a row's last number may be anything.
        columns: Numbers of a row.
    """
    count, dtype = pl.cdiv(columns, COLUMNS), x.dtype

    def of_tile(tile):
        return pl.ds(tile * COLUMNS, COLUMNS)

    def load(tile):
        return plgpu.load(x.at[:, of_tile(tile)], layout=_LAYOUT, optimized=False).astype(jnp.float32)

    def add_squares(tile, squares):
        numbers = load(tile)
        return squares + numbers * numbers

    none = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), _LAYOUT)
    mean = lax.fori_loop(0, count, add_squares, none).sum(axis=1) / columns
    inverse = lax.broadcast_in_dim(lax.rsqrt(mean + eps), (ROWS, COLUMNS), [0])

    @pl.loop(0, count)
    def norm_tile(tile):
        factor = _of_tile(scale, tile).astype(jnp.float32) + offset
        if columns % COLUMNS:
            column = plgpu.broadcasted_iota(jnp.int32, (COLUMNS,), 0, layout=_LAYOUT.reduce(0)) + tile * COLUMNS
            factor = jnp.where(column < columns, factor, 0.0)
        x[:, of_tile(tile)] = (load(tile) * inverse * lax.broadcast_in_dim(factor, (ROWS, COLUMNS), [1])).astype(dtype)

    plgpu.commit_smem()


def _of_tile(scale: Any, tile: Any) -> jax.Array:
    """A tile's numbers of the scale."""
    rows = COLUMNS // scale.shape[1]
    if rows == 1:
        return plgpu.load(scale.at[tile], layout=_LAYOUT.reduce(0), optimized=False)
    if tiles.interpret_params() is not None:
        return scale[pl.ds(tile * rows, rows)].reshape(COLUMNS)
    return plgpu.load(scale.reshape(-1, COLUMNS).at[tile], layout=_LAYOUT.reduce(0), optimized=False)
