"""Root-mean-square norm on Hopper: a block a row, all of it in the registers of one warpgroup.

What splits of a product add up to may be added to the row first: the sum is then a result beside its norm.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn_kernels.call import NormCall
from jattn_kernels.mosaic.sm90.common import launch
from jattn_kernels.mosaic.sm90.common.one_row import added_up, rounded_sum
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST, MULTIPLE, pieces
from jattn_kernels.operands import NormOperands

_MOST_COLUMNS = 8192  # 64 a thread


def supports(columns: int, *dtypes: Any) -> bool:
    """Whether there is a kernel for rows of so many numbers of such dtypes."""
    return (
        columns % MULTIPLE == 0
        and LEAST <= columns <= _MOST_COLUMNS
        and all(dtype in (jnp.bfloat16, jnp.float16) for dtype in dtypes)
    )


def rms_norm(
    call: NormCall, operands: NormOperands
) -> Float[Array, "T D"] | tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Rows over their root mean square, times a layer's scale and an offset; if something is added, the sum before."""
    x, eps, offset = operands.x, call.eps, call.offset
    columns = x.shape[1]
    parts = tuple(addition.parts for addition in operands.additions)
    of_row = pieces(columns)

    def kernel(x_ref, scale_ref, layer_ref, *refs):
        row = lax.axis_index("row")
        *parts_ref, out_ref = refs  # and, of a sum, that before the norm
        rows = x_ref.at[row], scale_ref.at[layer_ref[0]]
        # All is asked for before anything is stored: a load behind a store waits for what is stored.
        loaded = [[piece.load(ref).astype(jnp.float32) for ref in rows] for piece in of_row]
        if parts:
            *parts_refs, sum_ref = parts_ref
            additions = [[added_up(piece, ref, row) for ref in parts_refs] for piece in of_row]
            for piece, of_piece, of_parts in zip(of_row, loaded, additions, strict=True):
                of_piece[0] = functools.reduce(functools.partial(rounded_sum, dtype=x.dtype), of_parts, of_piece[0])
                piece.of(sum_ref.at[row])[...] = of_piece[0].astype(x.dtype)
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
