"""Products of whole columns in e2m1 with rows that warps hold, each warp its share of the depth: mma.sync, 16 x 8 x 16.

Weights become float16 as in `e2m1_products`.
"""

import itertools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.common.warp_instructions import const, matrices, pair
from jattn_kernels.mosaic.sm90.experts.column_sizes import COLUMNS, SCALED_UNITS, ColumnSizes
from jattn_kernels.mosaic.sm90.experts.e2m1 import power_of_two
from jattn_kernels.mosaic.sm90.experts.e2m1_products import added_products, factor_at, float16_numbers
from jattn_kernels.mosaic.sm90.experts.held_rows import WORDS, HeldRows, group_share, place_of_thread, words_of
from jattn_kernels.mxfp4 import GROUP
from jattn_kernels.quantized import NUMBERS_OF_BYTE

_GROUP_BYTES = GROUP // NUMBERS_OF_BYTE
_HALF = COLUMNS // 2


def store_products(
    rows: HeldRows,
    weights: Any,
    scales: Any,
    sums: Any,
    place: Any,
    warpgroup: Any,
    *,
    count: int,
    sizes: ColumnSizes,
) -> None:
    """Leaves each warp's sums of a unit of at most so many rows.

    Args:
        weights: (parts, lines / parts, 128), in shared memory.
        scales: (groups and those left free, parts, 64 / parts), likewise.
        sums: (warps, 16, rows and some left free), likewise.
        place: Which of the units it is that have these scales.
        warpgroup: Which of those that multiply this one is.
    """
    parts = weights.shape[0]
    if tiles.interpret_params() is not None:
        _interpreted(rows, weights, scales, sums, place, warpgroup, count, sizes)
        return
    groups, eights, width = sizes.warp_groups, len(sizes.row_counts), sizes.depth // NUMBERS_OF_BYTE
    words = plgpu.Layout.WG_STRIDED
    layouts = (words((each.shape[0],), vec_size=1) for each in rows)
    ref = plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(*layouts, plgpu.Layout.WG_SPLAT, ref, ref, ref))
    def store(ctx: Any, numbers: Any, factors: Any, place: Any, weights: Any, scales: Any, sums: Any) -> None:
        del ctx
        lane, warp, row, four = place_of_thread()
        own, numbers, factors = group_share(warp, sizes), words_of(numbers), words_of(factors)
        # Of 16 columns two matrices of 8 x 16 bytes a group: a thread has four bytes of a row of each.
        column, second = arith.remui(lane, const(COLUMNS)), arith.divui(lane, const(COLUMNS))
        word = _at(weights, arith.muli(column, const(width)))
        word = _byte(word, arith.muli(arith.addi(own, second), const(_GROUP_BYTES)))
        first_scale = arith.muli(place.registers.item(), const(COLUMNS // parts))
        scale = _at(scales, arith.addi(arith.muli(own, const(WGMMA_ROWS)), arith.addi(first_scale, row)))
        lower = WGMMA_ROWS // 2 if parts == 2 else _HALF  # from a scale to that of the eighth column after it
        found = [[arith.constant(ir.F32Type.get(), 0.0)] * 4 for _ in range(count // TILED_ROWS)]
        loaded: dict[int, list[Any]] = {}
        for group in range(groups):
            if group not in loaded:
                together = min(2, groups - group)
                of_two = matrices(_byte(word, const(group * _GROUP_BYTES)), 2 * together)
                loaded |= {group + i: of_two[2 * i : 2 * i + 2] for i in range(together)}
            of_columns = [factor_at(scale, group * WGMMA_ROWS + half * lower) for half in range(2)]
            firsts = ((group * eights + eight) * WORDS for eight in range(len(found)))
            of_rows = [numbers[first : first + WORDS] for first in firsts]
            found = added_products(found, loaded.pop(group), of_rows, of_columns)
        line = arith.addi(arith.muli(warp, const(COLUMNS)), row)
        target = arith.addi(arith.muli(line, const(sizes.row_sums)), arith.muli(four, const(2)))
        begin = utils.getelementptr(utils.memref_ptr(sums), [target], ir.F32Type.get())
        for eight, four_sums in enumerate(found):
            of_rows = [utils.bitcast(each, ir.F32Type.get()) for each in factors[2 * eight : 2 * eight + 2]]
            for half in range(2):
                both = [arith.mulf(four_sums[2 * half + i], of_rows[i]) for i in range(2)]
                offset = const(half * _HALF * sizes.row_sums + eight * TILED_ROWS)
                llvm.store(pair(*both), utils.getelementptr(begin, [offset], ir.F32Type.get()), alignment=8)

    run: Any = store
    run(*rows, place, weights, scales, sums)


def _interpreted(
    rows: HeldRows, weights: Any, scales: Any, sums: Any, place: Any, warpgroup: Any, count: int, sizes: ColumnSizes
) -> None:
    parts, width = weights.shape[0], sizes.depth // NUMBERS_OF_BYTE
    numbers = float16_numbers(weights[...].reshape(COLUMNS, width)).reshape(COLUMNS, sizes.groups, GROUP)
    side = COLUMNS // parts
    exponents = lax.dynamic_slice_in_dim(scales[...][: sizes.groups], place * side, side, axis=2)
    factors = power_of_two(exponents.reshape(-1)).reshape(sizes.groups, COLUMNS)
    plgpu.commit_smem()  # before a copy overwrites what has been read
    of_rows = rows.numbers[:count].reshape(count, sizes.groups, GROUP)
    products = jnp.einsum("cgk,rgk->gcr", numbers, of_rows, precision=lax.Precision.HIGHEST)
    products = products * factors[:, :, None] * rows.factors[:count][None, None]
    begins = [group_share(warp, sizes) for warp in range(sizes.warps + 1)]
    by_warp = jnp.stack([products[begin:end].sum(axis=0) for begin, end in itertools.pairwise(begins)])
    own = lax.dynamic_slice_in_dim(by_warp, warpgroup * WARPS, WARPS, axis=0)
    sums[pl.ds(warpgroup * WARPS, WARPS), :, pl.ds(0, count)] = own


def _at(ref: Any, offset: Any) -> Any:
    return _byte(utils.memref_ptr(ref), offset)


def _byte(pointer: Any, offset: Any) -> Any:
    return utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


assert SCALED_UNITS * COLUMNS == WGMMA_ROWS
