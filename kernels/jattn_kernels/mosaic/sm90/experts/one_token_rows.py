"""What one token's attention writes into tiles of keys and values after TMA: the token's own row, and rows of zeros.

A tile is a stage: 64 keys' first 64 columns, and below them the others. `commit_smem` is left to the caller.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.indexed import scatter
from jattn_kernels.mosaic.sm90.common.tile_stores import COLUMNS, tiled
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_stages import DEPTH

_KEYS = WGMMA_ROWS
_CHUNK = 8  # numbers that swizzling moves together
_LAYOUT = plgpu.Layout.WG_STRIDED((DEPTH,), vec_size=1)


def put_row(tile: Any, row: Any, numbers: Any) -> None:
    """The row of a key becomes these numbers, of which each thread stores one.

    Args:
        tile: (128, 64).
        numbers: (128,), in shared memory.
    """
    values = plgpu.load(numbers, layout=_LAYOUT, optimized=False)
    if tiles.interpret_params() is not None:
        for half in range(DEPTH // COLUMNS):
            tile[half * _KEYS + row] = values[half * COLUMNS : (half + 1) * COLUMNS]
        return
    number = plgpu.broadcasted_iota(jnp.int32, (DEPTH,), 0, layout=_LAYOUT)
    own_row, column = lax.div(number, COLUMNS) * _KEYS + row, lax.rem(number, COLUMNS)
    moved = (lax.div(column, _CHUNK) ^ lax.rem(own_row, TILED_ROWS)) * _CHUNK + lax.rem(column, _CHUNK)
    scatter(tile, own_row * COLUMNS + moved, values, _LAYOUT, of=tiled())


def clear_rows(tile: Any, first: Any) -> None:
    """The rows of keys from one on become 0: 0 * NaN is NaN, so masking the probabilities is not enough."""
    parts = [tile.at[pl.ds(half * _KEYS, _KEYS)] for half in range(DEPTH // COLUMNS)]
    values = [plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False) for part in parts]
    rows = plgpu.broadcasted_iota(jnp.int32, values[0].shape, 0, layout=plgpu.Layout.WGMMA)
    for part, numbers in zip(parts, values, strict=True):
        part[...] = jnp.where(rows < first, numbers, jnp.zeros_like(numbers))
