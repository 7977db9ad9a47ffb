"""Rows in 8 bits on Hopper: a block a row, all of it in registers; activated first, if asked.

Of few rows, which leave SMs idle, a row's block has several warpgroups that share it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn_kernels.mosaic.sm90.common import launch
from jattn_kernels.mosaic.sm90.common.rounded_rows import rounded_types, store_rounded
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST, VECTOR, Piece
from jattn_kernels.mosaic.sm90.common.shared_row import Meeting, meeting, of_all, sharers_of
from jattn_kernels.quantized import FP8, LARGEST, QuantizedRows, scale_of

_MOST_COLUMNS = 16 * 1024  # 128 a thread
_MOST_SHARERS = 4
_AT_ONCE = 2 * LEAST  # numbers that are activated before the next ones are made float32


def supports(columns: int) -> bool:
    """Whether there is a kernel for rows of so many numbers."""
    return columns % LEAST == 0 and columns <= _MOST_COLUMNS


def quantized_rows(
    x: Float[Array, "T _"], activation: Callable[[Array, Array], Array] | None, columns: int
) -> QuantizedRows:
    """Rows as `quantize_rows` rounds them; x's are twice as long where an activation takes both halves first."""
    halves, sharers = 1 if activation is None else 2, sharers_of(x.shape[0], columns, _MOST_SHARERS)

    def kernel(x_ref, *refs):
        row = lax.axis_index("row")
        if sharers > 1:
            share = functools.partial(_share, x_ref, refs, row, activation, columns)
            pl.run_scoped(share, meeting(columns, sharers), collective_axes="warpgroup")
            return
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
        num_threads=sharers,
        kernel_name="quantize_rows",
    )
    values, scales = run(x)
    return QuantizedRows(values=values, scales=scales, num_rows=x.shape[0], dtype=x.dtype)


def _share(
    x: Any,
    refs: tuple[Any, ...],
    row: Any,
    activation: Callable[[Array, Array], Array] | None,
    columns: int,
    place: Meeting,
) -> None:
    """A warpgroup's share of a row, 1,024 numbers at a time."""
    number, (values, scales) = lax.axis_index("warpgroup"), refs
    size = columns // place.sharers
    begins = [pl.multiple_of(number * size + begin, LEAST) for begin in range(0, size, LEAST)]
    layout = plgpu.Layout.WG_STRIDED((LEAST,), vec_size=VECTOR)

    def load(begin: Any) -> jax.Array:
        return plgpu.load(x.at[row].at[pl.ds(begin, LEAST)], layout=layout, optimized=False)

    loaded = [[load(half + begin) for half in (0, *((columns,) if activation else ()))] for begin in begins]
    numbers = []
    for first, *others in loaded:
        of_piece = first.astype(jnp.float32)
        if activation is not None:
            of_piece = activation(of_piece, others[0].astype(jnp.float32)).astype(x.dtype).astype(jnp.float32)
        numbers.append(of_piece)
    largest = functools.reduce(jnp.maximum, [jnp.abs(each) for each in numbers])
    scale = scale_of(of_all(largest, jnp.maximum, place, 0, number))
    for begin, each in zip(begins, numbers, strict=True):
        values.at[row].at[pl.ds(begin, LEAST)][...] = jnp.clip(each / scale, -LARGEST, LARGEST).astype(FP8)

    @pl.when(number == 0)
    def tell():
        scales[row] = scale


def _pieces(columns: int, halves: int) -> list[list[Piece]]:
    """What is loaded of each half for some of a row's numbers."""
    size = columns if halves == 1 else _AT_ONCE
    begins = range(0, columns, size)
    return [
        [Piece(half * columns + begin, min(size, columns - begin), 0) for half in range(halves)] for begin in begins
    ]
