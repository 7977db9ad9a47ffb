"""Rows in 8 bits on Hopper: a block a row, all of it in the registers of one warpgroup; normed first, if asked."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jattn_kernels.call import MatmulCall
from jattn_kernels.mosaic.sm90 import rms_norm
from jattn_kernels.mosaic.sm90.common import launch
from jattn_kernels.operands import MatmulOperands
from jattn_kernels.quantized import FP8, LARGEST, scale_of

_THREADS, _VECTOR = 128, 8  # numbers that a thread loads at once
_MOST_COLUMNS = 16 * 1024  # 128 a thread


def supports(columns: int) -> bool:
    """Whether there is a kernel for rows of so many numbers."""
    return columns % (_THREADS * _VECTOR) == 0 and columns <= _MOST_COLUMNS


def norms(call: MatmulCall) -> bool:
    """Whether it takes the norm of a call's rows too."""
    return call.norm is not None and rms_norm.supports(
        call.depth, jnp.dtype(call.dtype), jnp.dtype(call.norm.scale_dtype)
    )


def quantized_rows(
    call: MatmulCall, operands: MatmulOperands, *, num_rows: int, num_scales: int
) -> tuple[Float[Array, "R D"], Float32[Array, " S"]]:
    """A call's rows as `quantize_rows` rounds them; so many rows and scales, of which those past the call's are any."""
    x, norm, of_rows = operands.x, call.norm, operands.norm
    columns = x.shape[1]
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=_VECTOR)

    def load(ref: Any) -> Any:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def kernel(x_ref, *refs):
        *norm_refs, out_ref, scales_ref = refs
        row = lax.axis_index("row")
        numbers = load(x_ref.at[row])
        if norm is not None:
            scale_ref, layer_ref = norm_refs
            factor = load(scale_ref.at[layer_ref[0]]) + norm.offset
            inverse = lax.rsqrt((numbers * numbers).sum() / columns + norm.eps)
            numbers = (numbers * inverse * factor).astype(x.dtype).astype(jnp.float32)
        scale = scale_of(jnp.max(jnp.abs(numbers)))
        out_ref[row] = jnp.clip(numbers / scale, -LARGEST, LARGEST).astype(FP8)
        scales_ref[row] = scale

    run = launch.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((num_rows, columns), FP8), jax.ShapeDtypeStruct((num_scales,), jnp.float32)),
        grid=(x.shape[0],),
        grid_names=("row",),
        kernel_name="quantize_rows",
    )
    return run(x, *(() if of_rows is None else (of_rows.scale, of_rows.layer_index.reshape(1))))
