"""Products with weights in fp8 on Hopper: rows are rounded to fp8 by a kernel, with what is still to do before."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jattn_kernels.call import MatmulCall, NormCall
from jattn_kernels.mosaic.sm90 import rms_norm
from jattn_kernels.mosaic.sm90.common.rounded_rows import rounded_types
from jattn_kernels.mosaic.sm90.common.rounded_splits import rounds_splits
from jattn_kernels.mosaic.sm90.common.shared_row import RowOperands, adds_up, fits
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.fp8 import rows
from jattn_kernels.mosaic.sm90.fp8.product import fp8_matmul
from jattn_kernels.mosaic.sm90.fp8.tile_sizes import BLOCK_DEPTH, Fp8Tiles, choose_tiles
from jattn_kernels.operands import MatmulOperands
from jattn_kernels.quantized import QuantizedRows, quantize_rows
from jattn_kernels.splits import added

_DTYPES = ("bfloat16", "float16")
_MOST_WHOLE, _MOST_NORMED = 16 * 1024, 8192  # numbers of a row that a product's kernel rounds, and norms before


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
    if call.norm is not None and not _norms(call, call.norm):
        return f"`mosaic` does not norm {call.depth} numbers of {call.dtype} as it rounds them to fp8."
    if call.activation is not None and not rows.supports(call.depth):
        return f"`mosaic` takes no activation of {call.depth} numbers as it rounds them to fp8."
    return None


def _norms(call: MatmulCall, norm: NormCall) -> bool:
    if norm.of_sum:
        return adds_up(norm, _MOST_NORMED)
    return rms_norm.supports(call.depth, jnp.dtype(call.dtype), jnp.dtype(norm.scale_dtype))


def _tiles(call: MatmulCall) -> Fp8Tiles:
    shape = {"rows": call.num_rows, "depth": call.depth, "columns": call.columns}
    out_bytes = jnp.dtype(call.out_dtype).itemsize
    return choose_tiles(**shape, out_bytes=out_bytes, rounded=rounds_splits(call), whole_row=_is_whole(call))


def _is_whole(call: MatmulCall) -> bool:
    """Whether the product's kernel has all of the only row in shared memory, and rounds it."""
    as_it_is = not call.rounded and call.activation is None and (call.norm is None or call.norm.of_sum)
    return as_it_is and fits(call.num_rows, call.depth, _MOST_WHOLE)


def matmul(call: MatmulCall, operands: MatmulOperands) -> Any:
    """Rows in fp8 times weights in fp8, summed in float32, times both scales; cast once.

    Of a row that is added up first: that, the row's sum, and its norm.
    """
    assert operands.scales is not None
    x, x_scales, facts = operands.x, None, {}
    if not _is_whole(call):
        rounded = _rounded(call, operands)
        x, x_scales = rounded.values, rounded.scales
    elif operands.norm is not None:
        facts = {"norm": call.norm, "row": RowOperands.of(operands.norm)}
    weights = operands.kernel, operands.scales[..., 0], operands.layer_index
    out_dtype = jnp.dtype(call.out_dtype)
    out, of_row = fp8_matmul(
        x, x_scales, *weights, out_dtype, _tiles(call), num_rows=call.num_rows, rounded=rounds_splits(call), **facts
    )
    result = out if call.in_splits else added(out)
    return (result, *of_row) if of_row else result


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
