"""Products with weights in int4 on Hopper, of rows few enough that reading the weights is most of the work."""

from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp

from jattn_kernels.call import MatmulCall
from jattn_kernels.interleaved import in_turn
from jattn_kernels.mosaic.sm90.common.rounded_splits import rounds_splits
from jattn_kernels.mosaic.sm90.common.shared_row import RowOperands, adds_up, fits
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.int4.product import int4_matmul
from jattn_kernels.mosaic.sm90.int4.tile_sizes import PART_DEPTH, Int4Tiles, choose_tiles, gated_widths
from jattn_kernels.operands import MatmulOperands
from jattn_kernels.splits import Splits, added

MOST_ROWS = 256  # from there on it is faster to make the weights wider once, in memory
_LEAST_GROUP = 32
_MOST_WHOLE = 4096  # numbers of a row, a tile of eight of which fits beside the weights' stages
_DTYPES = ("bfloat16", "float16")


def refuses(call: MatmulCall) -> str | None:
    """Why a product with int4 weights cannot be served, or None."""
    assert call.group_size is not None
    if call.dtype not in _DTYPES:
        return f"`mosaic` takes bfloat16 and float16 rows with int4 weights, not {call.dtype}."
    if not 1 <= call.num_rows <= MOST_ROWS or call.depth % PART_DEPTH or call.columns % WGMMA_ROWS:
        return (
            f"`mosaic` takes 1 to {MOST_ROWS} rows of a multiple of {PART_DEPTH} numbers and a multiple of "
            f"{WGMMA_ROWS} columns of int4 weights, not {call.num_rows} rows and [{call.depth}, {call.columns}]."
        )
    size = call.group_size
    if size % PART_DEPTH and (PART_DEPTH % size or size < _LEAST_GROUP):
        return (
            f"`mosaic` takes int4 weights in groups of {_LEAST_GROUP}, 64 or a multiple of {PART_DEPTH} inputs, not "
            f"{size}."
        )
    if call.gate is not None and not _gates(call):
        return (
            "`mosaic` takes the activation of products of 57 to 64 rows with int4 weights, and of one row of columns "
            "that all SMs have as many of, which its kernel has in shared memory."
        )
    if call.norm is not None and not (call.interleaved and call.norm.of_sum and adds_up(call.norm, _MOST_WHOLE)):
        return (
            "`mosaic` norms one row before a product with interleaved int4 weights, and only if it adds it up too: of "
            f"at most {_MOST_WHOLE} numbers, a multiple of 1,024. Not {call.num_rows} of {call.depth}."
        )
    return None


def _gates(call: MatmulCall) -> bool:
    plain = call.out_dtype == call.dtype and (call.num_rows > 1 or _is_whole(call))
    return plain and bool(gated_widths(call.num_rows, call.columns))


def _is_whole(call: MatmulCall) -> bool:
    """Whether the product's kernel has all of the only row in shared memory."""
    return call.interleaved and fits(call.num_rows, call.depth, _MOST_WHOLE)


def _tiles(call: MatmulCall) -> Int4Tiles:
    assert call.group_size is not None
    return choose_tiles(
        rows=call.num_rows,
        depth=call.depth,
        columns=call.columns,
        groups=call.depth // call.group_size,
        zero_points=call.zero_points,
        sum_bytes=2 if rounds_splits(call) or call.gate is not None else 4,
        halves=1 if call.gate is None else 2,
        whole_row=_is_whole(call),
    )


def matmul(call: MatmulCall, operands: MatmulOperands) -> Any:
    """x @ kernel; XLA adds up the splits, beside whatever it does with them next, unless they are asked for.

    Of a row that is added up first: that, the row's sum, and its norm.
    """
    assert operands.scales is not None
    x, sizes = operands.x, _tiles(call)
    if not sizes.whole_row:
        if call.num_rows > TILED_ROWS:  # TMA copies whole tiles, unless there is less than one
            x = jnp.pad(x, ((0, -call.num_rows % TILED_ROWS), (0, 0)))
        if not call.interleaved:
            x = in_turn(x)  # multiplied with weights as if these were
    whole = pl.cdiv(call.num_rows, WARPS) * WARPS  # rows that the warps of a reader share out evenly
    parts, of_row = int4_matmul(
        x,
        operands.kernel,
        (operands.scales,) if operands.zero_points is None else (operands.scales, operands.zero_points),
        operands.layer_index,
        sizes,
        num_rows=whole if call.in_splits else call.num_rows,
        rounded=call.gate is not None or rounds_splits(call),
        activation=call.gate,
        norm=call.norm,
        row=None if operands.norm is None else RowOperands.of(operands.norm),
    )
    if call.gate is not None:
        gated = parts[0, : call.num_rows]
        return (gated, *of_row) if of_row else gated
    result: Any = Splits(parts=parts, num_rows=call.num_rows, dtype=jnp.dtype(call.out_dtype))
    if not call.in_splits:
        result = added(result)
    return (result, *of_row) if of_row else result
