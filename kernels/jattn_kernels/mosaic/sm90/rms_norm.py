"""Root-mean-square norm on Hopper: a block a row, all of it in the registers of one warpgroup, or of several
where there are not rows for all SMs.

What splits of a product add up to may be added to the row first: the sum is then a result beside its norm. The norm
may be rounded to fp8 as it is stored.
"""

import functools
import operator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn_kernels.call import NormCall
from jattn_kernels.mosaic.sm90.common import launch
from jattn_kernels.mosaic.sm90.common.one_row import added_up, rounded_sum
from jattn_kernels.mosaic.sm90.common.rounded_rows import rounded_types, store_rounded
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST, MULTIPLE, pieces
from jattn_kernels.mosaic.sm90.common.shared_row import (
    Meeting,
    RowOperands,
    meeting,
    normed_share,
    of_all,
    sharers_of,
)
from jattn_kernels.operands import NormOperands
from jattn_kernels.quantized import FP8, LARGEST, NormedRows, QuantizedRows, scale_of

_MOST_COLUMNS = 8192  # 64 a thread
_MOST_SHARERS = 4


def supports(columns: int, *dtypes: Any) -> bool:
    """Whether there is a kernel for rows of so many numbers of such dtypes."""
    return (
        columns % MULTIPLE == 0
        and LEAST <= columns <= _MOST_COLUMNS
        and all(dtype in (jnp.bfloat16, jnp.float16) for dtype in dtypes)
    )


def rms_norm(call: NormCall, operands: NormOperands) -> NormedRows | tuple[Float[Array, "T D"], NormedRows]:
    """Rows over their root mean square, times a layer's scale and an offset; if something is added, the sum before."""
    x, eps, offset = operands.x, call.eps, call.offset
    columns = x.shape[1]
    parts = tuple(addition.parts for addition in operands.additions)
    of_row, sharers = pieces(columns), sharers_of(x.shape[0], columns, _MOST_SHARERS)

    def kernel(x_ref, scale_ref, layer_ref, *refs):
        row = lax.axis_index("row")
        if sharers > 1:
            row_operands = RowOperands(scale_ref, layer_ref, refs[: len(parts)])
            share = functools.partial(_share, call, x_ref, row_operands, refs[len(parts) :], row)
            pl.run_scoped(share, meeting(columns, sharers), collective_axes="warpgroup")
            return
        refs, out_refs = (refs[:-2], refs[-2:]) if call.rounded else (refs[:-1], refs[-1:])
        rows = x_ref.at[row], scale_ref.at[layer_ref[0]]
        # All is asked for before anything is stored: a load behind a store waits for what is stored.
        loaded = [[piece.load(ref).astype(jnp.float32) for ref in rows] for piece in of_row]
        if parts:
            *parts_refs, sum_ref = refs
            additions = [[added_up(piece, ref, row) for ref in parts_refs] for piece in of_row]
            for piece, of_piece, of_parts in zip(of_row, loaded, additions, strict=True):
                of_piece[0] = functools.reduce(functools.partial(rounded_sum, dtype=x.dtype), of_parts, of_piece[0])
                piece.of(sum_ref.at[row])[...] = of_piece[0].astype(x.dtype)
        squares = [piece.once(numbers * numbers).sum() for piece, (numbers, _) in zip(of_row, loaded, strict=True)]
        inverse = lax.rsqrt(functools.reduce(operator.add, squares) / columns + eps)
        normed = []
        for piece, (numbers, factor) in zip(of_row, loaded, strict=True):
            of_piece = (numbers * inverse * (factor + offset)).astype(x.dtype)
            if call.rounded:
                normed.append((piece, of_piece.astype(jnp.float32)))
            else:
                piece.of(out_refs[0].at[row])[...] = of_piece
        if call.rounded:
            store_rounded(out_refs, row, normed)

    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    sum_types = (like_x,) if parts else ()
    out_types = rounded_types(*x.shape) if call.rounded else (like_x,)
    run = launch.kernel(
        kernel,
        out_type=(*sum_types, *out_types),
        grid=(x.shape[0],),
        grid_names=("row",),
        num_threads=sharers,
        kernel_name="rms_norm",
    )
    results = run(x, operands.scale, operands.layer_index.reshape(1), *parts)
    sums, (out, *scales) = results[: len(sum_types)], results[len(sum_types) :]
    if call.rounded:
        out = QuantizedRows(values=out, scales=scales[0], num_rows=x.shape[0], dtype=x.dtype)
    return (*sums, out) if parts else out


def _share(call: NormCall, x: Any, operands: RowOperands, outs: tuple[Any, ...], row: Any, place: Meeting) -> None:
    """A warpgroup's share of a row.

    Args:
        outs: The sum, if something is added; the norm, and its scale if it is rounded.
    """
    number = lax.axis_index("warpgroup")
    total, normed = normed_share(x, operands, row, call, place, number)
    size = total.shape[0]
    own = pl.ds(pl.multiple_of(number * size, size), size)
    if operands.additions:
        outs[0].at[row].at[own][...] = total.astype(x.dtype)
        outs = outs[1:]
    if not call.rounded:
        outs[0].at[row].at[own][...] = normed
        return
    values, scales = outs
    numbers = normed.astype(jnp.float32)
    scale = scale_of(of_all(jnp.abs(numbers), jnp.maximum, place, 1, number))
    values.at[row].at[own][...] = jnp.clip(numbers / scale, -LARGEST, LARGEST).astype(FP8)

    @pl.when(number == 0)
    def tell():
        scales[row] = scale
