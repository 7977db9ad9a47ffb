"""Sums that a product leaves turned: the columns of the result on wgmma's rows."""

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
