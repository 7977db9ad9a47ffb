"""Sums that a product leaves turned: the columns of the result on wgmma's rows."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.indexed import scatter


def store_turned(sums: Any, split: Any, first_row: Any, first_column: Any, result: jax.Array) -> None:
    """sums[split, first_row:, first_column:] = result^T, but for rows past the last: Pallas stores no such tile.

    Args:
        sums: float32 [S, R, F].
        result: (columns, rows), as wgmma leaves it.
    """
    _, num_rows, num_columns = sums.shape
    if tiles.interpret_params() is None:
        layout = plgpu.Layout.WGMMA
        column, row = (plgpu.broadcasted_iota(jnp.int32, result.shape, axis, layout=layout) for axis in range(2))
        column, row = column + first_column, row + first_row
        place = (split * num_rows + row) * num_columns + column
        scatter(sums, jnp.where(row < num_rows, place, -1), result, layout)
        return
    columns, rows = result.shape
    if rows >= num_rows:
        sums[split, pl.ds(0, num_rows), pl.ds(first_column, columns)] = result.T[:num_rows]
        return
    for row in range(rows):

        @pl.when(first_row + row < num_rows)
        def store_row(row=row):
            sums[split, first_row + row, pl.ds(first_column, columns)] = result[:, row]


def copy_turned(
    staging: Any,
    out: Any,
    first_row: Any,
    first_column: Any,
    result: jax.Array,
    *,
    overlap: int = 0,
    is_last: Any = None,
) -> None:
    """out[first_row:, first_column:] = result^T, rounded, by copies that may go on; some rows at a time.

    Args:
        staging: (parts, some rows, columns), tiled, of a warpgroup by itself.
        out: [R, F], in the dtype of `staging`. Rows past the last are not stored.
        result: (columns, rows), as wgmma leaves it.
        overlap: Columns that the last two warpgroups of a work tile have both, and store both.
        is_last: Whether this one is the last.
    """
    parts, staged, columns = staging.shape
    result = result.astype(staging.dtype)
    own = pl.ds(pl.multiple_of(first_column, math.gcd(columns, overlap)), columns)
    for number, begin in enumerate(range(0, result.shape[1], staged)):
        slot, first = staging.at[number % parts], first_row + begin
        plgpu.wait_smem_to_gmem(parts - 1, wait_read_only=True)  # what was staged there before
        slot.transpose((1, 0))[...] = result[:, begin : begin + staged]
        plgpu.commit_smem()
        if tiles.interpret_params() is None:
            plgpu.copy_smem_to_gmem(slot, out.at[pl.ds(first, staged), own])
            continue
        for row, kept in itertools.product(range(staged), {0, overlap}):  # the interpreter takes both for a race
            stored = (first + row < out.shape[0]) & ((is_last == (kept == overlap)) if overlap else True)
            of_row = slot.at[pl.ds(row, 1), pl.ds(kept, columns - kept)]
            target = out.at[pl.ds(first + row, 1), pl.ds(first_column + kept, columns - kept)]
            pl.when(stored)(functools.partial(plgpu.copy_smem_to_gmem, of_row, target))
