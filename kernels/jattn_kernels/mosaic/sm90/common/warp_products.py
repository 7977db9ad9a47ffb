"""Products of few rows by each warp on its own, of weights in registers: nothing is waited for before these are reused.

wgmma reads registers while the warpgroup goes on, which has to wait before it makes the next weights in them. A warp's
own product (mma.sync) takes them as any instruction does.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.common.warp_instructions import (
    const,
    i32,
    matrices,
    multiplied,
    pair,
    register_place,
    two,
)

_LANES = 32
_DEPTH = 16  # of one product, whose rows are two matrices of 8 x 8
_LOADED = 32  # numbers of a row that one load brings: four such matrices
_CHUNK_BYTES = 16  # of a row of a matrix
_BANK_BYTES = 128  # a swizzle repeats after 8 of these


def product(weights: jax.Array, rows: Any, width: int, total: jax.Array | None = None) -> jax.Array:
    """weights @ rows^T in float32, and a total if there is one, in wgmma's layout.

    Args:
        weights: (64 n, depth) of bfloat16 or float16, depth a multiple of 32; in wgmma's layout.
        rows: (8 n, depth) of that dtype, in shared memory, tiled as `tiles.tile` does it.
        width: Columns that lie together in that tile, 32 or 64.
        total: (64 n, 8 n).
    """
    (columns, depth), num_rows = weights.shape, rows.shape[0]
    assert columns % WGMMA_ROWS == 0
    assert num_rows % TILED_ROWS == 0
    assert depth % width == width % _LOADED == 0
    if tiles.interpret_params() is not None:
        numbers = rows[...].astype(jnp.float32)
        plgpu.commit_smem()  # before a copy overwrites what has been read
        found = lax.dot_general(
            weights.astype(jnp.float32), numbers, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
        )
        return found if total is None else total + found
    tiling: Any = plgpu.TilingTransform  # typed as abstract
    swizzling: Any = plgpu.SwizzleTransform
    line = width * rows.dtype.itemsize
    tiled = plgpu.RefType((tiling((TILED_ROWS, width)), swizzling(line)))
    shape, layout = (columns, num_rows), plgpu.Layout.WGMMA
    arguments = (weights, rows) if total is None else (weights, rows, total)

    @plgpu.inline_mgpu(
        arg_types=(layout, tiled, layout)[: len(arguments)],
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout),
    )
    def multiply(ctx: Any, weights: Any, rows: Any, total: Any = None) -> Any:
        del ctx
        zero = arith.constant(ir.F32Type.get(), 0.0)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        loads = [_load(rows, eight, line) for eight in range(num_rows // TILED_ROWS)]
        for block in range(columns // WGMMA_ROWS):
            for eight, of_rows in enumerate(loads):
                places = [register_place(block, eight, half) for half in range(2)]
                sums = [zero] * 4
                if total is not None:
                    sums = [number for place in places for number in two(total.registers[place])]
                for k in range(depth // _DEPTH):
                    own = [register_place(block, 2 * k + side, half) for side in range(2) for half in range(2)]
                    words = [utils.bitcast(weights.registers[place], i32()) for place in own]
                    sums = multiplied(words, of_rows[2 * k : 2 * k + 2], sums, weights.mlir_dtype)
                for half, place in enumerate(places):
                    registers[place] = pair(*sums[2 * half : 2 * half + 2])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    run: Any = multiply
    return run(*arguments)


def _load(rows: Any, eight: int, line: int) -> list[Any]:
    """Of eight rows each 8 numbers in turn: a thread has two of a row, as a product takes them from registers."""
    (_, column_tiles, _, width), (strides, _) = rows.type.shape, rows.type.get_strides_and_offset()
    itemsize = line // width
    lane = arith.remui(arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x)), const(_LANES))
    row, chunk = arith.remui(lane, const(TILED_ROWS)), arith.divui(lane, const(TILED_ROWS))
    swizzled = arith.divui(row, const(_BANK_BYTES // line))
    pointer, byte = utils.memref_ptr(rows), ir.IntegerType.get_signless(8)
    first, words = arith.muli(row, const(line)), []
    for tile in range(column_tiles):
        for begin in range(0, width, _LOADED):
            of_chunk = arith.xori(arith.addi(chunk, const(begin * itemsize // _CHUNK_BYTES)), swizzled)
            place = arith.addi(first, arith.muli(of_chunk, const(_CHUNK_BYTES)))
            begin_of_tile = (eight * strides[0] + tile * strides[1]) * itemsize
            own = utils.getelementptr(pointer, [arith.addi(place, const(begin_of_tile))], byte)
            words += matrices(own, 4)
    return words
