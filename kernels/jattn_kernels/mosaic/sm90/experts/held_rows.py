"""Rows of a tile, held by the warps that multiply them: in float16, in registers, each warp its share of the depth.

Each thread has what its part of a product takes (mma.sync): of row `lane / 4` of eight, inputs of a group of 32. A row
is divided by a power of two that brings its largest number to 2^14 up to 2^15: bfloat16's eight bits are kept of all
that is larger than 2^-31 of that, and what is smaller is off by at most 2^-40 of it.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.row_pieces import THREADS
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS
from jattn_kernels.mosaic.sm90.common.warp_instructions import const, i32
from jattn_kernels.mosaic.sm90.experts.column_sizes import ColumnSizes
from jattn_kernels.mosaic.sm90.experts.e2m1_products import FACTOR, ORDER
from jattn_kernels.mosaic.sm90.experts.two_terms import BIAS, MANTISSA, factor_of, scaled
from jattn_kernels.mxfp4 import GROUP

WORDS = 4  # of a group's row that a thread has
_TOP = 14  # the exponent that a row's largest number gets
_LANES, _FOUR = 32, 4
_WORD_BYTES, _NUMBER_BYTES = 4, 2
_SHIFT_OF_BFLOAT16 = MANTISSA - 16
_LAYOUT: Any = plgpu.Layout.WG_STRIDED


class HeldRows(NamedTuple):
    """Registers, opaque to Pallas; under the interpreter the numbers themselves, [rows, K].

    Attributes:
        numbers: Of a thread, by group, by eight rows, four words.
        factors: What products are to be multiplied with, of each eight rows those of two that a thread has sums of.
    """

    numbers: jax.Array
    factors: jax.Array


def group_share(warp: Any, sizes: ColumnSizes) -> Any:
    """The first of a warp's groups; those of the next warp begin where its own end."""
    product = warp * sizes.groups if isinstance(warp, int) else arith.muli(warp, const(sizes.groups))
    return product // sizes.warps if isinstance(warp, int) else arith.divui(product, const(sizes.warps))


def load_rows(x: Any, sources: Any, maxima: Any, first: Any, rows: Any, sizes: ColumnSizes) -> jax.Array:
    """A tile's rows as they are; leaves the largest exponent of each warp's share of a row in `maxima`.

    Args:
        x: [X, K], bfloat16 in global memory.
        sources: Which row of x stands in a slot, likewise; None where they stand in their slots.
        maxima: (warps, rows), int32 in shared memory.
        first, rows: The tile's first slot, and how many follow.
    """
    most = x.shape[0] - 1
    if tiles.interpret_params() is not None:
        slots = [first + jnp.minimum(number, rows - 1) for number in range(sizes.rows)]
        return jnp.stack([x[jnp.clip(slot if sources is None else sources[slot], 0, most)] for slot in slots])
    number, ref = plgpu.Layout.WG_SPLAT, plgpu.RefType()
    refs = (x, maxima) if sources is None else (x, maxima, sources)
    count = sizes.warp_groups * len(sizes.row_counts) * WORDS

    @plgpu.inline_mgpu(
        arg_types=(number, number, *[ref] * len(refs)),
        return_type=plgpu.ShapeDtypeStruct((THREADS * count,), jnp.int32, layout=_of_words(count)),
    )
    def load(ctx: Any, first: Any, rows: Any, x: Any, maxima: Any, sources: Any = None) -> Any:
        del ctx
        first, rows = first.registers.item(), rows.registers.item()
        lane, warp, row, four = place_of_thread()
        own, begin = group_share(warp, sizes), utils.memref_ptr(x)
        width = x.type.shape[1] * _NUMBER_BYTES
        loaded: dict[tuple[int, int], list[Any]] = {}
        for eight in range(len(sizes.row_counts)):
            of_tile = arith.minsi(arith.addi(row, const(eight * TILED_ROWS)), arith.subi(rows, const(1)))
            source = arith.addi(first, of_tile)
            if sources is not None:
                source = llvm.load(i32(), utils.getelementptr(utils.memref_ptr(sources), [source], i32()))
            source = arith.minsi(arith.maxsi(source, const(0)), const(most))
            i64 = ir.IntegerType.get_signless(64)
            offset = arith.muli(arith.extui(i64, source), arith.constant(i64, width))
            of_row = utils.getelementptr(begin, [offset], _i8())
            largest = const(0)
            for group in range(sizes.warp_groups):
                at = arith.addi(arith.muli(arith.addi(own, const(group)), const(_FOUR)), four)
                pointer = utils.getelementptr(of_row, [arith.muli(at, const(WORDS * _WORD_BYTES))], _i8())
                words = llvm.load(ir.VectorType.get((WORDS,), i32()), pointer, alignment=WORDS * _WORD_BYTES)
                found = [llvm.extractelement(words, const(i)) for i in range(WORDS)]
                loaded[group, eight] = [_if_own(word, group, warp, own, sizes) for word in found]
                for word in loaded[group, eight]:
                    largest = _ptx("{.reg .b32 a; abs.bf16x2 a, $2; max.NaN.bf16x2 $0, $1, a;}", largest, word)
            exponent = arith.maxui(
                arith.shrui(largest, const(16 + _SHIFT_OF_BFLOAT16)),
                arith.shrui(arith.andi(largest, const(0xFFFF)), const(_SHIFT_OF_BFLOAT16)),
            )
            for lanes in (2, 1):
                exponent = arith.maxsi(exponent, _shuffled(exponent, f"bfly.b32 $0, $1, {lanes}"))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, four, const(0))):
                place = arith.addi(arith.muli(warp, const(sizes.rows)), arith.addi(row, const(eight * TILED_ROWS)))
                llvm.store(exponent, utils.getelementptr(utils.memref_ptr(maxima), [place], i32()))
        del lane
        return _array([word for key in np.ndindex(sizes.warp_groups, len(sizes.row_counts)) for word in loaded[key]])

    run: Any = load
    return run(first, rows, *refs)


def held(loaded: jax.Array, maxima: Any, sizes: ColumnSizes) -> HeldRows:
    """The rows as products take them, once all warps have left their `maxima`."""
    if tiles.interpret_params() is not None:
        parts = [scaled([row.astype(jnp.float32)], _TOP) for row in loaded]
        numbers = jnp.stack([row.astype(jnp.float16).astype(jnp.float32) for (row,), _ in parts])
        return HeldRows(numbers, jnp.stack([factor_of(exponent, _TOP) * FACTOR for _, exponent in parts]))
    eights = len(sizes.row_counts)
    counts = sizes.warp_groups * eights * WORDS, 2 * eights

    @plgpu.inline_mgpu(
        arg_types=(_of_words(counts[0]), plgpu.RefType()),
        return_type=tuple(
            plgpu.ShapeDtypeStruct((THREADS * count,), jnp.int32, layout=_of_words(count)) for count in counts
        ),
    )
    def convert(ctx: Any, loaded: Any, maxima: Any) -> Any:
        del ctx
        _, _, row, four = place_of_thread()
        words, factors = words_of(loaded), []
        numbers: list[Any] = [None] * len(words)
        for eight in range(eights):
            exponent = const(_TOP + 1)
            for warp in range(sizes.warps):
                place = arith.addi(row, const(warp * sizes.rows + eight * TILED_ROWS))
                found = llvm.load(i32(), utils.getelementptr(utils.memref_ptr(maxima), [place], i32()))
                exponent = arith.maxsi(exponent, found)
            power = _float(arith.shli(arith.subi(const(2 * BIAS + _TOP), exponent), const(MANTISSA)))
            factor = _float(arith.shli(arith.subi(exponent, const(_TOP)), const(MANTISSA)))
            factor = utils.bitcast(arith.mulf(factor, arith.constant(ir.F32Type.get(), FACTOR)), i32())
            for number in range(2):
                source = arith.muli(arith.addi(arith.muli(four, const(2)), const(number)), const(_FOUR))
                factors.append(_shuffled(factor, "idx.b32 $0, $1, $2", source))
            for group in range(sizes.warp_groups):
                first = (group * eights + eight) * WORDS
                halves = [_float(half) for word in words[first : first + WORDS] for half in _halves(word)]
                halves = [arith.mulf(half, power) for half in halves]
                for i, (lower, upper) in enumerate(zip(ORDER[::2], ORDER[1::2], strict=True)):
                    numbers[first + i] = _ptx("cvt.rn.f16x2.f32 $0, $1, $2;", halves[upper], halves[lower])
        return _array(numbers), _array(factors)

    run: Any = convert
    return HeldRows(*run(loaded, maxima))


def words_of(array: Any) -> list[Any]:
    """A thread's words."""
    return [llvm.extractelement(register, const(0)) for register in array.registers.flat]


def _if_own(word: Any, group: int, warp: Any, own: Any, sizes: ColumnSizes) -> Any:
    """A word, or 0 where the group is the next warp's."""
    if group < sizes.groups // sizes.warps:
        return word
    following = group_share(arith.addi(warp, const(1)), sizes)
    is_own = arith.cmpi(arith.CmpIPredicate.ult, arith.addi(own, const(group)), following)
    return arith.select(is_own, word, const(0))


def _of_words(count: int) -> Any:
    return _LAYOUT((THREADS * count,), vec_size=1)


def _array(words: list[Any]) -> Any:
    kind = ir.VectorType.get((1,), i32())
    registers = np.empty(len(words), dtype=object)
    for i, word in enumerate(words):
        registers[i] = llvm.insertelement(llvm.mlir_undef(kind), word, const(0))
    layout = mgpu.WGStridedFragLayout((THREADS * len(words),), 1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def place_of_thread() -> tuple[Any, Any, Any, Any]:
    """Lane and warp of a thread; of the lane the row of eight, and which of four it is."""
    thread = arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x))
    lane = arith.remui(thread, const(_LANES))
    return (
        lane,
        arith.divui(thread, const(_LANES)),
        arith.divui(lane, const(_FOUR)),
        arith.remui(lane, const(_FOUR)),
    )


def _halves(word: Any) -> list[Any]:
    """Two numbers of bfloat16 as float32's bits."""
    return [arith.shli(word, const(16)), arith.andi(word, const(0xFFFF0000))]


def _shuffled(value: Any, form: str, *operands: Any) -> Any:
    text = f"shfl.sync.{form}, 31, 0xffffffff;"
    constraints = ",".join(["=r", "r", *["r"] * len(operands)])
    return llvm.inline_asm(i32(), [value, *operands], text, constraints, has_side_effects=True)


def _ptx(text: str, *operands: Any) -> Any:
    kinds = ["f" if operand.type == ir.F32Type.get() else "r" for operand in operands]
    return llvm.inline_asm(i32(), list(operands), text, ",".join(["=r", *kinds]))


def _float(bits: Any) -> Any:
    return utils.bitcast(bits, ir.F32Type.get())


def _i8() -> Any:
    return ir.IntegerType.get_signless(8)


assert GROUP == _FOUR * WORDS * 2
