"""Root-mean-square norm on Hopper: a block a row, all of it in the registers of one warpgroup.

What splits of a product add up to may be added to the row first: the sum is then a result beside its norm.
"""

import functools
import operator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn_kernels.call import NormCall
from jattn_kernels.mosaic.sm90.common import launch
from jattn_kernels.operands import NormOperands

_THREADS, _VECTOR = 128, 8  # numbers that a thread loads at once
_MOST_COLUMNS = 8192  # 64 a thread


def supports(columns: int, *dtypes: Any) -> bool:
    """Whether there is a kernel for rows of so many numbers of such dtypes."""
    return (
        columns % (_THREADS * _VECTOR) == 0
        and columns <= _MOST_COLUMNS
        and all(dtype in (jnp.bfloat16, jnp.float16) for dtype in dtypes)
    )


def rms_norm(
    call: NormCall, operands: NormOperands
) -> Float[Array, "T D"] | tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Rows over their root mean square, times a layer's scale and an offset; if something is added, the sum before."""
    x, eps, offset = operands.x, call.eps, call.offset
    columns = x.shape[1]
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=_VECTOR)
    parts = () if operands.addition is None else (operands.addition.parts,)

    def kernel(x_ref, scale_ref, layer_ref, *refs):
        row = lax.axis_index("row")

        def load(ref):
            return plgpu.load(ref, layout=layout, optimized=False)

        # All is asked for before anything is stored: a load behind a store waits for what is stored.
        numbers, factor = (load(ref).astype(jnp.float32) for ref in (x_ref.at[row], scale_ref.at[layer_ref[0]]))
        if parts:
            parts_ref, sum_ref, out_ref = refs
            addition = functools.reduce(operator.add, [load(parts_ref.at[i, row]) for i in range(len(parts[0]))])
            total = (numbers + addition.astype(x.dtype).astype(jnp.float32)).astype(x.dtype)
            sum_ref[row] = total
            numbers = total.astype(jnp.float32)
        else:
            (out_ref,) = refs
        inverse = lax.rsqrt((numbers * numbers).sum() / columns + eps)
        out_ref[row] = (numbers * inverse * (factor + offset)).astype(x.dtype)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    run = launch.kernel(
        kernel,
        out_type=(out, out) if parts else out,
        grid=(x.shape[0],),
        grid_names=("row",),
        kernel_name="rms_norm",
    )
    return run(x, operands.scale, operands.layer_index.reshape(1), *parts)
