"""Products with weights in fp8 on Hopper: rows are rounded to fp8 by a kernel, with their norm if it is still to do."""

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.call import MatmulCall
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.fp8 import rows
from jattn_kernels.mosaic.sm90.fp8.product import fp8_matmul
from jattn_kernels.mosaic.sm90.fp8.tile_sizes import BLOCK_DEPTH, choose_tiles
from jattn_kernels.operands import MatmulOperands
from jattn_kernels.quantized import quantize_rows

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
    if call.norm is not None and (call.norm.of_sum or not rows.norms(call)):
        return f"`mosaic` does not norm {call.depth} numbers of {call.dtype} as it rounds them to fp8."
    return None


def matmul(call: MatmulCall, operands: MatmulOperands) -> Float[Array, "T F"]:
    """Rows in fp8 times weights in fp8, summed in float32, times both scales; cast once."""
    out_dtype = jnp.dtype(call.out_dtype)
    sizes = choose_tiles(rows=call.num_rows, depth=call.depth, columns=call.columns, out_bytes=out_dtype.itemsize)
    # TMA copies whole tiles, unless there is less than one.
    whole = call.num_rows if call.num_rows <= TILED_ROWS else pl.cdiv(call.num_rows, TILED_ROWS) * TILED_ROWS
    num_scales = pl.cdiv(call.num_rows, sizes.block_rows) * sizes.block_rows
    if call.norm is not None or rows.supports(call.depth):
        x, x_scales = rows.quantized_rows(call, operands, num_rows=whole, num_scales=num_scales)
    else:
        x, x_scales = quantize_rows(operands.x)
        x = jnp.pad(x, ((0, whole - call.num_rows), (0, 0)))
        x_scales = jnp.pad(x_scales[:, 0], (0, num_scales - call.num_rows))
    assert operands.scales is not None
    factors = operands.scales[..., 0]
    return fp8_matmul(x, x_scales, operands.kernel, factors, operands.layer_index, out_dtype, sizes)[: call.num_rows]
