"""Rows from anywhere in memory as one operand of a product: copies that no TMA of Hopper can make.

Every thread of the producer warpgroup copies pieces of 16 bytes with `cp.async` to where wgmma expects them. Mosaic has
no such copy in Pallas, so the few instructions are written out here; the interpreter copies row by row instead.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm

from jattn_kernels.mosaic.sm90.common import tiles

_THREADS = 128
_PIECE_BYTES = 16
ROW_BYTES = 128  # of a tile: what a swizzle of 128 bytes permutes
_PIECES = ROW_BYTES // _PIECE_BYTES


def gather_rows(x: Any, sources: Any, target: Any, first: jax.Array, rows: jax.Array, column: jax.Array) -> None:
    """Starts copying a tile: its row r is x[sources[first + r], column : column + 128 bytes], for r < rows.

    What was in other rows of the tile stays. The copies of one call are one group of `gathered`.

    Args:
        x: [X, K] in global memory; K is a multiple of 128 bytes.
        sources: Rows of x, in global memory; None if row i is meant by i.
        target: Tiled shared memory, [R, 128 bytes].
    """
    if tiles.interpret_params() is not None:
        _copy_by_rows(x, sources, target, first, rows, column)
        return
    itemsize = jnp.dtype(x.dtype).itemsize
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    tiled = plgpu.RefType((tiling((tiles.TILED_ROWS, ROW_BYTES // itemsize)), swizzling(ROW_BYTES)))
    number = plgpu.Layout.WG_SPLAT
    most_rows, depth = target.shape[0], x.shape[1]
    refs = (x, target) if sources is None else (x, target, sources)
    arg_types = (plgpu.RefType(), tiled, plgpu.RefType())[: len(refs)]

    @plgpu.inline_mgpu(arg_types=(number, number, number, *arg_types))
    def start(ctx, first, rows, column, x, target, sources=None):
        del ctx
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        first, rows, column = (_scalar(each) for each in (first, rows, column))

        def const(value):
            return arith.constant(i32, value)

        def wide(value):
            return arith.extui(i64, value)

        thread = arith.remui(_thread_index(), const(_THREADS))
        piece, own_row = arith.remui(thread, const(_PIECES)), arith.divui(thread, const(_PIECES))
        x_address = llvm.ptrtoint(i64, utils.memref_ptr(x))
        target_pointer = utils.memref_ptr(target)
        in_row = arith.addi(arith.muli(column, const(itemsize)), arith.muli(piece, const(_PIECE_BYTES)))
        swizzled = arith.xori(piece, arith.andi(own_row, const(_PIECES - 1)))
        in_tile = arith.muli(swizzled, const(_PIECE_BYTES))
        for begin in range(0, most_rows, _THREADS // _PIECES):
            row = arith.addi(own_row, const(begin))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, row, rows)):
                source = arith.addi(first, row)
                if sources is not None:
                    source = llvm.load(i32, utils.getelementptr(utils.memref_ptr(sources), [source], i32))
                offset = arith.addi(arith.muli(wide(source), arith.constant(i64, depth * itemsize)), wide(in_row))
                address = llvm.inttoptr(llvm.PointerType.get(address_space=1), arith.addi(x_address, offset))
                place = arith.addi(arith.muli(row, const(ROW_BYTES)), in_tile)
                pointer = utils.getelementptr(target_pointer, [place], ir.IntegerType.get_signless(8))
                nvvm.cp_async_shared_global(pointer, address, _PIECE_BYTES, nvvm.LoadCacheModifierKind.CG)
        nvvm.cp_async_commit_group()

    start(first, rows, column, *refs)


def _copy_by_rows(x: Any, sources: Any, target: Any, first: jax.Array, rows: jax.Array, column: jax.Array) -> None:
    @pl.loop(0, rows)
    def copy_row(row):
        source = first + row if sources is None else sources[first + row]
        target[row] = x[source, pl.ds(column, target.shape[-1])]


def gathered(under_way: int) -> None:
    """Waits until no more than so many of this thread's latest groups are under way; wgmma then sees the others."""
    if tiles.interpret_params() is not None:
        plgpu.commit_smem()
        return

    def wait(ctx: Any) -> None:
        del ctx
        nvvm.cp_async_wait_group(under_way)
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    inlined: Any = plgpu.inline_mgpu()(wait)
    inlined()


def _scalar(splat: Any) -> Any:
    """The number that an array of one number is made of."""
    return splat.registers.item()


def _thread_index() -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
