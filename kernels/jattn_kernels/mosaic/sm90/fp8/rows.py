"""Rows in 8 bits on Hopper: a block a row, all of it in the registers of one warpgroup; activated first, if asked."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn_kernels.mosaic.sm90.common import launch
from jattn_kernels.mosaic.sm90.common.rounded_rows import rounded_types, store_rounded
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST, Piece
from jattn_kernels.quantized import QuantizedRows

_MOST_COLUMNS = 16 * 1024  # 128 a thread
_AT_ONCE = 2 * LEAST  # numbers that are activated before the next ones are made float32


def supports(columns: int) -> bool:
    """Whether there is a kernel for rows of so many numbers."""
    return columns % LEAST == 0 and columns <= _MOST_COLUMNS


def quantized_rows(
    x: Float[Array, "T _"], activation: Callable[[Array, Array], Array] | None, columns: int
) -> QuantizedRows:
    """Rows as `quantize_rows` rounds them; x's are twice as long where an activation takes both halves first."""
    halves = 1 if activation is None else 2

    def kernel(x_ref, *refs):
        row = lax.axis_index("row")
        loaded = [[piece.load(x_ref.at[row]) for piece in part] for part in _pieces(columns, halves)]
        numbers = []
        for (piece, *_), (first, *others) in zip(_pieces(columns, halves), loaded, strict=True):
            of_piece = first.astype(jnp.float32)
            if activation is not None:
                of_piece = activation(of_piece, others[0].astype(jnp.float32)).astype(x.dtype).astype(jnp.float32)
            numbers.append((piece, of_piece))
        store_rounded(refs, row, numbers)

    run = launch.kernel(
        kernel,
        out_type=rounded_types(x.shape[0], columns),
        grid=(x.shape[0],),
        grid_names=("row",),
        kernel_name="quantize_rows",
    )
    values, scales = run(x)
    return QuantizedRows(values=values, scales=scales, num_rows=x.shape[0], dtype=x.dtype)


def _pieces(columns: int, halves: int) -> list[list[Piece]]:
    """What is loaded of each half for some of a row's numbers."""
    size = columns if halves == 1 else _AT_ONCE
    begins = range(0, columns, size)
    return [
        [Piece(half * columns + begin, min(size, columns - begin), 0) for half in range(halves)] for begin in begins
    ]
