"""Root-mean-square norm on Hopper: a block a row, all of it in the registers of one warpgroup.

What splits of a product add up to may be added to the row first: the sum is then a result beside its norm.

A warpgroup loads a multiple of 1,024 numbers at a time. Of a row that is no multiple of them the last 1,024 are a piece
of their own, whose first numbers were in the piece before: these are stored twice, the same both times, and count once.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn_kernels.call import NormCall
from jattn_kernels.mosaic.sm90.common import launch
from jattn_kernels.operands import NormOperands

_THREADS, _VECTOR = 128, 8  # numbers that a thread loads at once
_AT_ONCE = _THREADS * _VECTOR
_MULTIPLE = 64  # of numbers that rows are
_MOST_COLUMNS = 8192  # 64 a thread


def supports(columns: int, *dtypes: Any) -> bool:
    """Whether there is a kernel for rows of so many numbers of such dtypes."""
    return (
        columns % _MULTIPLE == 0
        and _AT_ONCE <= columns <= _MOST_COLUMNS
        and all(dtype in (jnp.bfloat16, jnp.float16) for dtype in dtypes)
    )


class Piece(NamedTuple):
    """Numbers of a row that are loaded together, of which the first `again` are in an earlier piece too."""

    begin: int
    count: int
    again: int

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.count,), vec_size=_VECTOR)

    def of(self, row: Any) -> Any:
        """Of a row's ref this piece's."""
        return row if self.count == row.shape[0] else row.at[pl.ds(self.begin, self.count)]

    def load(self, row: Any) -> jax.Array:
        return plgpu.load(self.of(row), layout=self.layout, optimized=False)

    def once(self, numbers: jax.Array) -> jax.Array:
        """The piece's numbers, 0 for those that are in an earlier one."""
        if not self.again:
            return numbers
        number = plgpu.broadcasted_iota(jnp.int32, (self.count,), 0, layout=self.layout)
        return jnp.where(number < self.again, jnp.zeros_like(numbers), numbers)


def pieces(columns: int) -> list[Piece]:
    """Those of a row of so many numbers, at least 1,024."""
    whole = columns // _AT_ONCE * _AT_ONCE
    last = [] if columns == whole else [Piece(columns - _AT_ONCE, _AT_ONCE, whole + _AT_ONCE - columns)]
    return [Piece(0, whole, 0), *last]


def rms_norm(
    call: NormCall, operands: NormOperands
) -> Float[Array, "T D"] | tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Rows over their root mean square, times a layer's scale and an offset; if something is added, the sum before."""
    x, eps, offset = operands.x, call.eps, call.offset
    columns = x.shape[1]
    parts = () if operands.addition is None else (operands.addition.parts,)
    of_row = pieces(columns)

    def kernel(x_ref, scale_ref, layer_ref, *refs):
        row = lax.axis_index("row")
        *parts_ref, out_ref = refs
        rows = x_ref.at[row], scale_ref.at[layer_ref[0]]
        # All is asked for before anything is stored: a load behind a store waits for what is stored.
        loaded = [[piece.load(ref).astype(jnp.float32) for ref in rows] for piece in of_row]
        if parts:
            parts_ref, sum_ref = parts_ref
            splits = range(len(parts[0]))
            additions = [functools.reduce(operator.add, [p.load(parts_ref.at[i, row]) for i in splits]) for p in of_row]
            for piece, of_piece, addition in zip(of_row, loaded, additions, strict=True):
                total = (of_piece[0] + addition.astype(x.dtype).astype(jnp.float32)).astype(x.dtype)
                piece.of(sum_ref.at[row])[...] = total
                of_piece[0] = total.astype(jnp.float32)
        squares = [piece.once(numbers * numbers).sum() for piece, (numbers, _) in zip(of_row, loaded, strict=True)]
        inverse = lax.rsqrt(functools.reduce(operator.add, squares) / columns + eps)
        for piece, (numbers, factor) in zip(of_row, loaded, strict=True):
            piece.of(out_ref.at[row])[...] = (numbers * inverse * (factor + offset)).astype(x.dtype)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    run = launch.kernel(
        kernel,
        out_type=(out, out) if parts else out,
        grid=(x.shape[0],),
        grid_names=("row",),
        kernel_name="rms_norm",
    )
    return run(x, operands.scale, operands.layer_index.reshape(1), *parts)
