"""A stage's products of weights in int4 with one row: each warp has 32 columns and a quarter of the stage's depth.

A weight in the upper four bits of a byte is 16 times itself in 8 bits, sign and all: three instructions make eight of
them, of a word and of that word four bits higher.
"""

import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jattn_kernels.interleaved import INPUTS, in_turn
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.common.warp_instructions import (
    const,
    i32,
    matrices,
    pair,
    register_place,
    two,
)
from jattn_kernels.mosaic.sm90.mlp.compact_row import FOUR, LANES, SUMMED, TOGETHER, CompactRow, thread, words_of
from jattn_kernels.mosaic.sm90.mlp.units import DEPTH, PARTS, SHARES, SIDE

SUMS = WARPS * SIDE  # of a warpgroup: a column has one of each warp
_OF_WARP = DEPTH // WARPS
_TILE, _EIGHT = 16, 8  # columns of a product; rows of a matrix
_LINE, _CHUNK = 128, 16  # bytes of a share of a column's weights, and of 32 inputs of it
_UPPER, _TIMES = 0xF0F0F0F0, 16
_DIGIT = 256  # of a row's whole numbers
_RESULTS = 4  # of a thread's product


def place_of(column: Any, warp: int) -> Any:
    """The place of a warp's sum of a column."""
    return column // _TILE * WGMMA_ROWS + warp * _TILE + column % _TILE


def stage_added(
    total: jax.Array, weights: Any, of_groups: list[Any], group_size: int, row: CompactRow, first: Any
) -> jax.Array:
    """The sums with a stage's products, each times its group's scales; all columns are the same.

    Args:
        total: (128, 8), in wgmma's layout, by `place_of`.
        weights: (64, 256), in shared memory: 32 columns by the first half of the depth, then by the second.
        of_groups: (2, groups or more, 16), likewise, of the first 16 columns, then of the others: scales; and zero
            points, if there are some.
        group_size: Inputs that have one of these.
        row: With sums if there are zero points.
        first: The stage's first input.
    """
    if tiles.interpret_params() is not None:
        return _interpreted(total, weights, of_groups, group_size, row, first)
    tiling: Any = plgpu.TilingTransform  # typed as abstract
    swizzling: Any = plgpu.SwizzleTransform
    packed = plgpu.RefType((tiling((TILED_ROWS, weights.shape[1])), swizzling(_LINE)))
    layout: Any = plgpu.Layout.WGMMA

    refs = *of_groups, *row.refs

    @plgpu.inline_mgpu(
        arg_types=(layout, packed, *[plgpu.RefType()] * len(refs), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=layout),
    )
    def add(ctx: Any, total: Any, weights: Any, *given: Any) -> Any:
        del ctx
        *refs, first = given
        own = refs[: len(of_groups)], CompactRow(*refs[len(of_groups) :])
        return _added(total, weights, own[0], group_size, own[1], first.registers.item())

    run: Any = add
    return run(total, weights, *refs, first)


def store_sums(total: jax.Array, target: Any) -> None:
    """One of the columns of (128, 8) that are all the same.

    Args:
        target: (128,), in shared memory.
    """
    if tiles.interpret_params() is not None:
        target[...] = total[:, 0]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def put(ctx: Any, target: Any, total: Any) -> None:
        del ctx
        lane, warp = _lane_and_warp()
        own = arith.addi(_times(warp, _TILE), arith.divui(lane, const(FOUR)))
        pointer = utils.getelementptr(utils.memref_ptr(target), [own], ir.F32Type.get())
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, arith.remui(lane, const(FOUR)), const(0))):
            for tile in range(PARTS):
                for half in range(2):
                    number = llvm.extractelement(total.registers[register_place(tile, 0, half)], const(0))
                    offset = const(tile * WGMMA_ROWS + half * _EIGHT)
                    llvm.store(number, utils.getelementptr(pointer, [offset], ir.F32Type.get()))

    run: Any = put
    run(target, total)


def _interpreted(
    total: jax.Array, weights: Any, of_groups: list[Any], group_size: int, row: CompactRow, first: Any
) -> jax.Array:
    numbers = in_turn(weights[...]).astype(jnp.float32).reshape(DEPTH // weights.shape[1], SIDE, -1)
    numbers = numbers.transpose(1, 0, 2).reshape(SIDE, WARPS, -1)
    of_row = row.digits[pl.ds(first, DEPTH)].reshape(1, WARPS, -1)
    factors, *zero_points = (
        each[:, : DEPTH // group_size].astype(jnp.float32).transpose(0, 2, 1).reshape(SIDE, WARPS, -1)
        for each in of_groups
    )
    plgpu.commit_smem()  # before a copy overwrites what has been read
    numbers = numbers.reshape(SIDE, WARPS, -1, group_size)
    for each in zero_points:
        numbers -= each[..., None]
    sums = (numbers * of_row.reshape(1, WARPS, -1, group_size)).sum(axis=-1)
    sums = (sums * factors).sum(axis=-1).reshape(PARTS, _TILE, WARPS).transpose(0, 2, 1).reshape(-1, 1)
    return total + jnp.broadcast_to(sums, total.shape)


def _added(total: Any, weights: Any, of_groups: list[Any], group_size: int, row: CompactRow, first: Any) -> Any:
    lane, warp = _lane_and_warp()
    word = _weights_of(weights, lane, warp)
    scale, *zero_points = (_of_columns(each, group_size, lane, warp) for each in of_groups)
    group = arith.addi(arith.divui(first, const(TOGETHER)), warp)
    pointer = utils.getelementptr(utils.memref_ptr(row.factors), [group], ir.F32Type.get())
    of_row = llvm.intr_fma(llvm.load(ir.F32Type.get(), pointer), _f32(1.0 / _TIMES), _f32(0.0))
    rows = [words_of(row.digits, group, half) for half in range(2)]
    sums = [[two(total.registers[register_place(tile, 0, half)])[0] for half in range(2)] for tile in range(PARTS)]
    for begin in range(0, _OF_WARP, group_size):
        found = [[const(0)] * _RESULTS for _ in range(PARTS)]
        for block in range(begin // INPUTS, (begin + group_size) // INPUTS):
            own = rows[block // 2][2 * (block % 2) : 2 * (block % 2) + 2]
            for tile in range(PARTS):
                halves = word(tile, block)
                wide = [_upper(each) for each in [arith.muli(half, const(_TIMES)) for half in halves] + halves]
                found[tile] = _multiplied(wide, own, found[tile])
        row_sums = [_row_sum(row, group, begin, group_size) for _ in zero_points]
        for tile in range(PARTS):
            for half in range(2):
                place = tile, begin // group_size, half
                factor = arith.mulf(arith.extf(ir.F32Type.get(), scale(*place)), of_row)
                upper, lower = found[tile][2 * half : 2 * half + 2]
                whole = arith.addi(_times(upper, _DIGIT), lower)
                number = arith.sitofp(ir.F32Type.get(), whole)
                for zero_point, row_sum in zip(zero_points, row_sums, strict=True):
                    taken = arith.sitofp(ir.F32Type.get(), _times(arith.extsi(i32(), zero_point(*place)), -_TIMES))
                    number = llvm.intr_fma(taken, row_sum, number)
                sums[tile][half] = llvm.intr_fma(number, factor, sums[tile][half])
    registers = total.registers.copy()
    for tile in range(PARTS):
        for half in range(2):
            registers[register_place(tile, 0, half)] = pair(*[sums[tile][half]] * 2)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _multiplied(weights: list[Any], rows: list[Any], sums: list[Any]) -> list[Any]:
    """The sums with a product of 16 columns and 8 rows, 32 numbers of 8 bits deep."""
    places = (0, 4), (4, 8), (8, 10), (10, 14)
    found, of_weights, of_rows, before = ("{" + ", ".join(f"${i}" for i in range(*ends)) + "}" for ends in places)
    text = f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {found}, {of_weights}, {of_rows}, {before};"
    operands = *weights, *rows, *sums
    return list(utils.inline_ptx(text, *operands, result_types=[i32()] * _RESULTS, convergent=True))


def _weights_of(weights: Any, lane: Any, warp: Any) -> Any:
    """Of 16 columns, 32 inputs of the warp's: a thread's words of columns that are eight apart; each read once."""
    warps = WARPS // SHARES
    share, chunk = arith.divui(warp, const(warps)), _times(arith.remui(warp, const(warps)), _OF_WARP // INPUTS)
    in_matrix, upper = arith.remui(lane, const(_EIGHT)), arith.remui(arith.divui(lane, const(_EIGHT)), const(2))
    chunk = arith.addi(chunk, arith.divui(lane, const(_TILE)))  # the other two matrices are of the next 32 inputs
    column = arith.addi(_times(share, SIDE), arith.addi(_times(upper, _EIGHT), in_matrix))
    pointer = _byte(utils.memref_ptr(weights), _times(column, _LINE))
    loaded: dict[tuple[int, int], list[Any]] = {}

    def word(tile: int, block: int) -> list[Any]:
        if (tile, block) not in loaded:
            swizzled = arith.xori(arith.addi(chunk, const(block)), in_matrix)
            at = _byte(pointer, arith.addi(_times(swizzled, _CHUNK), const(tile * _TILE * _LINE)))
            words = matrices(at, FOUR)
            loaded[tile, block], loaded[tile, block + 1] = words[:2], words[2:]
        return loaded[tile, block]

    return word


def _upper(word: Any) -> Any:
    return arith.andi(word, const(_UPPER))


def _f32(value: float) -> Any:
    return arith.constant(ir.F32Type.get(), value)


def _of_columns(of_groups: Any, group_size: int, lane: Any, warp: Any) -> Any:
    """What a thread's columns have: of a tile, of one of the warp's groups, of the tile's first half or second."""
    (_, rows, _), kind = of_groups.type.shape, of_groups.type.element_type
    of_warp = _times(warp, _OF_WARP // group_size * _TILE)
    own = arith.addi(of_warp, arith.divui(lane, const(FOUR)))
    pointer = utils.getelementptr(utils.memref_ptr(of_groups), [own], kind)

    def number(tile: int, group: int, half: int) -> Any:
        place = (tile * rows + group) * _TILE + half * _EIGHT
        return llvm.load(kind, utils.getelementptr(pointer, [const(place)], kind))

    return number


def _row_sum(row: CompactRow, group: Any, begin: int, size: int) -> Any:
    """Of so many of the row's whole numbers."""
    first = arith.addi(_times(group, TOGETHER // SUMMED), const(begin // SUMMED))
    pointer = utils.getelementptr(utils.memref_ptr(row.sums), [first], i32())
    sums = [llvm.load(i32(), utils.getelementptr(pointer, [const(i)], i32())) for i in range(size // SUMMED)]
    return arith.sitofp(ir.F32Type.get(), functools.reduce(arith.addi, sums))


def _lane_and_warp() -> tuple[Any, Any]:
    own = thread()
    return arith.remui(own, const(LANES)), arith.remui(arith.divui(own, const(LANES)), const(WARPS))


def _times(value: Any, by: int) -> Any:
    return arith.muli(value, const(by))


def _byte(pointer: Any, offset: Any) -> Any:
    return utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))
