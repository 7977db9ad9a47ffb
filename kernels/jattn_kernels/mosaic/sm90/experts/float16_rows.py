"""Rows put into shared memory in float16, in the order in which a thread multiplies them with weights of four bits.

A row is divided by a power of two that brings its largest number to 2^14 up to 2^15: bfloat16's eight bits are kept of
all that is larger than 2^-31 of that, and what is smaller is off by at most 2^-40 of it.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.row_pieces import THREADS, VECTOR, Piece, pieces
from jattn_kernels.mosaic.sm90.common.tiles import WARPS
from jattn_kernels.mosaic.sm90.experts.e2m1_products import FACTOR, ORDER
from jattn_kernels.mosaic.sm90.experts.two_terms import BIAS, MANTISSA, factor_of, scaled
from jattn_kernels.mxfp4 import GROUP

_TOP = 14  # the exponent that a row's largest number gets
_BYTES = 2
_LANES = 32
_VECTORS_OF_GROUP = GROUP // VECTOR


def put_rows_in_float16(
    x: Any,
    sources: Any,
    target: Any,
    factors: Any,
    first: Any,
    rows: Any,
    warpgroup: Any,
    *,
    warpgroups: int,
    split: int,
) -> None:
    """Writes a warpgroup's rows of a tile, and what their products are to be multiplied with: a warp or four a row.

    All that write are the block's first warpgroups. No warp waits for another.

    Args:
        x: [X, K], bfloat16 in global memory.
        sources: Which row of x stands in a slot, likewise; None where they stand in their slots.
        target: (groups, rows, 32), in shared memory.
        factors: (rows), likewise.
        first, rows: The tile's first slot, and how many follow.
        warpgroup, warpgroups: Which one this is of how many.
        split: Warps that share a row, 1 or 4.
    """
    teams, most = warpgroups * WARPS // split, x.shape[0] - 1
    if tiles.interpret_params() is not None:

        @pl.loop(0, lax.div(rows - warpgroup + warpgroups - 1, warpgroups))
        def put_row(i):
            number = warpgroup + i * warpgroups
            slot = first + number
            row = jnp.clip(slot if sources is None else sources[slot], 0, most)
            (numbers,), exponent = scaled([x[row].astype(jnp.float32)], _TOP)
            target[:, number] = numbers.astype(jnp.float16).reshape(-1, GROUP)
            factors[number] = factor_of(exponent, _TOP) * FACTOR

        return
    number, ref = plgpu.Layout.WG_SPLAT, plgpu.RefType()
    refs = (x, target, factors) if sources is None else (x, target, factors, sources)

    @pl.loop(0, lax.div(rows + teams - 1, teams))
    def put_row(i):
        @plgpu.inline_mgpu(arg_types=(number, number, number, *[ref] * len(refs)))
        def put(
            ctx: Any, first: Any, rows: Any, i: Any, x: Any, target: Any, factors: Any, sources: Any = None
        ) -> None:
            del ctx
            first, rows, i = (each.registers.item() for each in (first, rows, i))
            warp = arith.divui(_thread(), _const(_LANES))
            own = arith.addi(arith.muli(i, _const(teams)), arith.divui(warp, _const(split)))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, own, rows)):
                source = arith.addi(first, own)
                if sources is not None:
                    source = llvm.load(_i32(), utils.getelementptr(utils.memref_ptr(sources), [source], _i32()))
                source = arith.minsi(arith.maxsi(source, _const(0)), _const(most))
                _put(x, source, target, factors, own, arith.remui(warp, _const(split)), split)

        run: Any = put
        run(first, rows, i, *refs)


def _put(x: Any, source: Any, target: Any, factors: Any, row: Any, own: Any, split: int) -> None:
    """A row by a warp, or a share of it, once the warp has seen all of it."""
    vectors, (_, rows, _) = x.type.shape[1] // VECTOR, target.type.shape
    begin = utils.getelementptr(utils.memref_ptr(x), [arith.muli(_wide(source), _wide(vectors))], _four())
    lane = arith.remui(_thread(), _const(_LANES))

    def number(step: Any) -> Any:
        """Of a lane's vector, the last one's for those past it."""
        return arith.minsi(arith.addi(lane, arith.muli(step, _const(_LANES))), _const(vectors - 1))

    def load(vector: Any) -> list[Any]:
        words = llvm.load(_four(), utils.getelementptr(begin, [vector], _four()), alignment=VECTOR * _BYTES)
        return [llvm.extractelement(words, _const(i)) for i in range(VECTOR // 2)]

    steps = -(-vectors // _LANES)
    loaded = [load(number(_const(step))) for step in range(steps)]
    largest = _const(0)
    for word in (word for words in loaded for word in words):
        largest = _ptx("{.reg .b32 a; abs.bf16x2 a, $2; max.NaN.bf16x2 $0, $1, a;}", largest, word)
    exponent = arith.constant(_i32(), _TOP + 1)
    for half in _halves(largest):
        exponent = arith.maxsi(exponent, arith.shrui(half, _const(MANTISSA)))
    for lanes in (16, 8, 4, 2, 1):
        other = _ptx(f"shfl.sync.bfly.b32 $0, $1, {lanes}, 31, 0xffffffff;", exponent)
        exponent = arith.maxsi(exponent, other)
    power = _float(arith.shli(arith.subi(_const(2 * BIAS + _TOP), exponent), _const(MANTISSA)))
    pointer, row_place = utils.memref_ptr(target), arith.muli(row, _const(GROUP * _BYTES))
    for step in range(-(-steps // split)):
        vector = number(arith.addi(_const(step * split), own) if split > 1 else _const(step))
        words = load(vector) if split > 1 else loaded[step]
        numbers = [arith.mulf(_float(half), power) for word in words for half in _halves(word)]
        pairs = [
            _ptx("cvt.rn.f16x2.f32 $0, $1, $2;", numbers[upper], numbers[lower])
            for lower, upper in zip(ORDER[::2], ORDER[1::2], strict=True)
        ]
        stored = llvm.mlir_undef(_four())
        for i, pair in enumerate(pairs):
            stored = llvm.insertelement(stored, pair, _const(i))
        place = arith.addi(row_place, _place(vector, rows))
        llvm.store(stored, utils.getelementptr(pointer, [place], _i8()), alignment=VECTOR * _BYTES)
    factor = _float(arith.shli(arith.subi(exponent, _const(_TOP)), _const(MANTISSA)))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, arith.ori(lane, own), _const(0))):
        factor = arith.mulf(factor, arith.constant(ir.F32Type.get(), FACTOR))
        llvm.store(factor, utils.getelementptr(utils.memref_ptr(factors), [row], ir.F32Type.get()))


def _halves(word: Any) -> list[Any]:
    """Two numbers of bfloat16 as float32's bits."""
    return [arith.shli(word, _const(16)), arith.andi(word, _const(-(1 << 16)))]


def _ptx(text: str, *operands: Any) -> Any:
    kinds = ["f" if operand.type == ir.F32Type.get() else "r" for operand in operands]
    is_shuffle = text.startswith("shfl")
    return llvm.inline_asm(_i32(), list(operands), text, ",".join(["=r", *kinds]), has_side_effects=is_shuffle)


def _float(bits: Any) -> Any:
    return utils.bitcast(bits, ir.F32Type.get())


def _thread() -> Any:
    return arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x))


def _wide(value: Any) -> Any:
    i64 = ir.IntegerType.get_signless(64)
    return arith.constant(i64, value) if isinstance(value, int) else arith.extui(i64, value)


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _i8() -> Any:
    return ir.IntegerType.get_signless(8)


def _four() -> Any:
    return ir.VectorType.get((VECTOR // 2,), _i32())


def _const(value: int) -> Any:
    return arith.constant(_i32(), value)


def put_numbers_in_float16(row: list[jax.Array], target: Any, number: Any) -> Any:
    """Writes a row by a warpgroup, and returns what its products are to be multiplied with.

    Args:
        row: Its pieces.
        target: (groups, rows, 32), in shared memory.
        number: Of the rows.
    """
    in_pieces, exponent = scaled([numbers.astype(jnp.float32) for numbers in row], _TOP)
    for piece, numbers in zip(pieces(target.shape[0] * GROUP), in_pieces, strict=True):
        _store(target, number, numbers.astype(jnp.float16), piece)
    return factor_of(exponent, _TOP) * FACTOR


def _store(target: Any, row: Any, values: jax.Array, piece: Piece) -> None:
    """A thread's eight numbers are a vector of a row of a group."""
    if tiles.interpret_params() is not None:
        groups = pl.ds(piece.begin // GROUP, piece.size // GROUP)
        target[groups, row] = values.reshape(-1, GROUP)
        return
    rows = target.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, piece.layout))
    def store(ctx: Any, target: Any, row: Any, values: Any) -> None:
        del ctx
        thread = arith.remui(_thread(), _const(THREADS))
        pointer, row_place = utils.memref_ptr(target), arith.muli(row.registers.item(), _const(GROUP * _BYTES))
        for i, register in enumerate(values.registers.flat):
            vector = arith.addi(thread, _const(piece.begin // VECTOR + i * THREADS))
            turned = llvm.shufflevector(register.type, register, register, list(ORDER))
            place = arith.addi(row_place, _place(vector, rows))
            llvm.store(turned, utils.getelementptr(pointer, [place], _i8()), alignment=VECTOR * _BYTES)

    run: Any = store
    run(target, row, values)


def _place(vector: Any, rows: int) -> Any:
    """Bytes to a vector of a row, from the row's first."""
    group, of_group = (op(vector, _const(_VECTORS_OF_GROUP)) for op in (arith.divui, arith.remui))
    return arith.addi(arith.muli(group, _const(rows * GROUP * _BYTES)), arith.muli(of_group, _const(VECTOR * _BYTES)))
