"""A row put into two terms of fp8 where wgmma expects it, in the order in which weights of 4 bits are multiplied.

The tile of shared memory has 32 inputs a row, eight rows together, swizzled by 32 bytes: of a group of inputs those of
even numbers make the first half of a row of it, and those of odd numbers the second.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.row_pieces import THREADS, VECTOR, Piece, pieces
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS
from jattn_kernels.mosaic.sm90.experts.e2m1 import FACTOR, in_order
from jattn_kernels.mosaic.sm90.experts.two_terms import FIRSTS, SECONDS, factor_of, in_terms
from jattn_kernels.mxfp4 import GROUP
from jattn_kernels.quantized import FP8

_WORD = 4  # bytes
_SWIZZLED_ROWS = 4  # after which the halves of a row of the tile change places


def put_in_terms(row: Any, target: Any, number: Any, rows: int) -> Any:
    """Writes the terms of a row to rows `number` and `rows + number` of a tile; what they are to be multiplied with.

    Args:
        row: [K] in global memory.
        target: [terms * rows, K], tiled.
    """
    of_row = pieces(row.shape[0])
    terms, exponent = in_terms([piece.load(row).astype(jnp.float32) for piece in of_row])
    for piece, of_piece in zip(of_row, terms, strict=True):
        for term, values in enumerate(of_piece):
            _store(target, number + term * rows, values.astype(FP8), piece)
    return factor_of(exponent) * FACTOR


def _store(target: Any, row: Any, values: jax.Array, piece: Piece) -> None:
    """target[row, columns of the piece] = in_order(values): a thread's eight numbers are two words of it."""
    if tiles.interpret_params() is not None:
        target[row, pl.ds(piece.begin, piece.size)] = in_order(values[None])[0]
        return
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    tiled = plgpu.RefType((tiling((TILED_ROWS, GROUP)), swizzling(GROUP)))
    columns = target.shape[1]

    @plgpu.inline_mgpu(arg_types=(tiled, plgpu.Layout.WG_SPLAT, piece.layout))
    def store(ctx: Any, target: Any, row: Any, values: Any) -> None:
        del ctx
        i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        two_words = ir.VectorType.get((2,), i32)

        def const(value: int) -> Any:
            return arith.constant(i32, value)

        row = row.registers.item()
        in_tile = arith.remui(row, const(TILED_ROWS))
        swaps = arith.remui(arith.divui(in_tile, const(_SWIZZLED_ROWS)), const(2))
        row_place = arith.addi(
            arith.muli(arith.divui(row, const(TILED_ROWS)), const(TILED_ROWS * columns)),
            arith.muli(in_tile, const(GROUP)),
        )
        thread = arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), const(THREADS))
        pointer = utils.memref_ptr(target)
        for i, register in enumerate(values.registers.flat):
            words = utils.bitcast(register, two_words)
            low, high = (llvm.extractelement(words, const(word)) for word in range(2))
            vector = arith.addi(thread, const(piece.begin // VECTOR + i * THREADS))
            group, word = (op(vector, const(GROUP // VECTOR)) for op in (arith.divui, arith.remui))
            place = arith.addi(row_place, arith.muli(group, const(TILED_ROWS * GROUP)))
            place = arith.addi(place, arith.muli(word, const(_WORD)))
            for half, chosen in enumerate((FIRSTS, SECONDS)):
                numbers = llvm.inline_asm(i32, [low, high], f"prmt.b32 $0, $1, $2, {chosen};", "=r,r,r")
                offset = arith.muli(arith.xori(swaps, const(half)), const(GROUP // 2))
                llvm.store(numbers, utils.getelementptr(pointer, [arith.addi(place, offset)], i8))

    run: Any = store
    run(target, row, values)
