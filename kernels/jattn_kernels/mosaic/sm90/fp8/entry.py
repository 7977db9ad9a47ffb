"""Products with weights in fp8 on Hopper: rows are rounded to fp8 by a kernel, with what is still to do before."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.call import MatmulCall
from jattn_kernels.mosaic.sm90 import rms_norm
from jattn_kernels.mosaic.sm90.common.rounded_rows import rounded_types
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.fp8 import rows
from jattn_kernels.mosaic.sm90.fp8.product import fp8_matmul
from jattn_kernels.mosaic.sm90.fp8.tile_sizes import BLOCK_DEPTH, choose_tiles
from jattn_kernels.operands import MatmulOperands
from jattn_kernels.quantized import QuantizedRows, quantize_rows
from jattn_kernels.splits import Splits, added

_DTYPES = ("bfloat16", "float16")


def refuses(call: MatmulCall) -> str | None:
    """Why a product with fp8 weights cannot be served, or None."""
    if call.dtype not in _DTYPES or call.scales != "channel":
        return (
            "`mosaic` takes bfloat16 and float16 rows with fp8 weights of a scale for each output channel, not "
            f"{call.dtype} rows and scales of each {call.scales}."
        )
    if call.num_rows == 0 or call.depth % BLOCK_DEPTH or call.columns % WGMMA_ROWS:
        return (
            f"`mosaic` takes some rows of a multiple of {BLOCK_DEPTH} numbers and a multiple of {WGMMA_ROWS} columns "
            f"of fp8 weights, not {call.num_rows} rows and [{call.depth}, {call.columns}]."
        )
    if call.norm is not None and (
        call.norm.of_sum or not rms_norm.supports(call.depth, jnp.dtype(call.dtype), jnp.dtype(call.norm.scale_dtype))
    ):
        return f"`mosaic` does not norm {call.depth} numbers of {call.dtype} as it rounds them to fp8."
    if call.activation is not None and not rows.supports(call.depth):
        return f"`mosaic` takes no activation of {call.depth} numbers as it rounds them to fp8."
    return None


def matmul(call: MatmulCall, operands: MatmulOperands) -> Float[Array, "T F"] | Splits:
    """Rows in fp8 times weights in fp8, summed in float32, times both scales; cast once."""
    out_dtype = jnp.dtype(call.out_dtype)
    sizes = choose_tiles(rows=call.num_rows, depth=call.depth, columns=call.columns, out_bytes=out_dtype.itemsize)
    x = _rounded(call, operands)
    assert operands.scales is not None
    factors, layer = operands.scales[..., 0], operands.layer_index
    out = fp8_matmul(x.values, x.scales, operands.kernel, factors, layer, out_dtype, sizes, num_rows=call.num_rows)
    return out if call.in_splits else added(out)


def _rounded(call: MatmulCall, operands: MatmulOperands) -> QuantizedRows:
    """A call's rows, with what is to be done before."""
    if call.norm is not None:
        assert operands.norm is not None
        normed = rms_norm.rms_norm(dataclasses.replace(call.norm, rounded=True), operands.norm)
        assert isinstance(normed, QuantizedRows)
        return normed
    if operands.row_scales is None and rows.supports(call.depth):
        return rows.quantized_rows(operands.x, call.activation, call.depth)
    values, scales = operands.x, operands.row_scales
    if scales is None:
        (values, scales), types = quantize_rows(operands.x), rounded_types(call.num_rows, call.depth)
        whole, num_scales = (each.shape[0] for each in types)
        values = jnp.pad(values, ((0, whole - call.num_rows), (0, 0)))
        scales = jnp.pad(scales[:, 0], (0, num_scales - call.num_rows))
    return QuantizedRows(values=values, scales=scales, num_rows=call.num_rows, dtype=jnp.dtype(call.dtype))
