"""Rows that a kernel rounds to fp8 as it stores them, a row a block: where they lie, and how."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from jattn_kernels.mosaic.sm90.common.row_pieces import Piece
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS
from jattn_kernels.quantized import FP8, LARGEST, scale_of

_SCALES = 256  # of the rows of a product's work tile, at most: so many are read at a time


def rounded_types(num_rows: int, columns: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Values and scales of so many rows: whole tiles of values, which TMA copies, unless there is less than one."""
    whole = num_rows if num_rows <= TILED_ROWS else pl.cdiv(num_rows, TILED_ROWS) * TILED_ROWS
    scales = pl.cdiv(num_rows, _SCALES) * _SCALES
    return jax.ShapeDtypeStruct((whole, columns), FP8), jax.ShapeDtypeStruct((scales,), jnp.float32)


def store_rounded(refs: Sequence[Any], row: Any, numbers: Sequence[tuple[Piece, jax.Array]]) -> None:
    """A row's numbers, in float32, over the scale of the largest; and that scale.

    Args:
        refs: Of the rows' values and of their scales.
    """
    values, scales = refs
    largest: dict[tuple[int, ...], jax.Array] = {}  # of pieces of one size, one reduction
    for _, of_piece in numbers:
        sizes = jnp.abs(of_piece)
        largest[sizes.shape] = jnp.maximum(largest[sizes.shape], sizes) if sizes.shape in largest else sizes
    scale = scale_of(functools.reduce(jnp.maximum, [jnp.max(sizes) for sizes in largest.values()]))
    for piece, of_piece in numbers:
        piece.of(values.at[row])[...] = jnp.clip(of_piece / scale, -LARGEST, LARGEST).astype(FP8)
    scales[row] = scale
