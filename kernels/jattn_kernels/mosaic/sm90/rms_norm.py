"""Root-mean-square norm on Hopper: a block a row, all of it in the registers of one warpgroup."""

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


def rms_norm(call: NormCall, operands: NormOperands) -> Float[Array, "T D"]:
    """Rows over their root mean square, times a layer's scale and an offset."""
    x, eps, offset = operands.x, call.eps, call.offset
    columns = x.shape[1]
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=_VECTOR)

    def kernel(x_ref, scale_ref, layer_ref, out_ref):
        row = lax.axis_index("row")
        numbers, factor = (
            plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
            for ref in (x_ref.at[row], scale_ref.at[layer_ref[0]])
        )
        inverse = lax.rsqrt((numbers * numbers).sum() / columns + eps)
        out_ref[row] = (numbers * inverse * (factor + offset)).astype(x.dtype)

    run = launch.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        grid_names=("row",),
        kernel_name="rms_norm",
    )
    return run(x, operands.scale, operands.layer_index.reshape(1))
