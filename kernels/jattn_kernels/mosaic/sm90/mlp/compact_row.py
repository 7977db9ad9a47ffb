"""One row in shared memory as whole numbers of 16 bits, in two digits of 8, with a factor for each 128 of them.

A bfloat16 number has eight bits and a float16 number eleven; what is rounded here is 1/65,024 of the largest of the
128 at most. A row has no others beside it, as it would in a tile: the digits are two columns of a product (mma.sync,
16 x 8 x 32). Of 32 inputs each of a quad's four threads multiplies 8, in the order in which `interleaved.py` has them:
those of its bytes' lower four bits, then those of the upper ones.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.warp_instructions import const, i32

TOGETHER, SUMMED = 128, 32  # inputs that have a factor, and a sum
LARGEST = 32512  # of the whole numbers: a digit of 127 and one of 0
LANES, FOUR = 32, 4
_VECTOR, _PAIR = 8, 2  # inputs that a thread puts into the row; inputs of a quad's thread that lie together
_OF_DIGITS = 64  # words of 128 inputs
_ROUNDING = 12582912.0  # 2^23 + 2^22: whole numbers are the lowest bits of what is that much larger
_ROUNDING_BITS = 0x4B400000
_TINY = 1e-30  # a group of smaller numbers is one of zeros
_HALF_DIGIT = 0x80


class CompactRow(NamedTuple):
    """In shared memory.

    Attributes:
        digits: Words; in the interpreter the numbers themselves, as they are rounded.
        factors: Of each 128 inputs, float32.
        sums: Of each 32 whole numbers; None where nobody needs them.
    """

    digits: Any
    factors: Any
    sums: Any = None

    @classmethod
    def scratch(cls, inputs: int, *, with_sums: bool) -> "CompactRow":
        """For rows of so many."""
        is_there = tiles.interpret_params() is not None
        digits = plgpu.SMEM((inputs,), jnp.float32) if is_there else plgpu.SMEM((inputs // 2,), jnp.int32)
        sums = plgpu.SMEM((inputs // SUMMED,), jnp.int32) if with_sums else None
        return cls(digits, plgpu.SMEM((inputs // TOGETHER,), jnp.float32), sums)

    def store(self, piece: Any, numbers: jax.Array) -> None:
        """Puts a piece of numbers into the row (`rows.Piece`), (1024,) in float32."""
        if tiles.interpret_params() is not None:
            groups = numbers.reshape(-1, TOGETHER)
            largest = jnp.max(jnp.abs(groups), axis=1, keepdims=True)
            rounded = jnp.round(groups * (LARGEST / jnp.maximum(largest, _TINY))) * (largest / LARGEST)
            piece.put(self.digits, rounded.reshape(-1))
            return
        layout, own_refs = plgpu.Layout.WG_STRIDED(numbers.shape, vec_size=_VECTOR), self.refs

        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(own_refs), plgpu.Layout.WG_SPLAT, layout))
        def put(ctx: Any, *given: Any) -> None:
            del ctx
            *refs, begin, numbers = given
            own = [llvm.extractelement(numbers.registers.item(), const(i)) for i in range(_VECTOR)]
            thread_of_row = arith.addi(arith.divui(begin.registers.item(), const(_VECTOR)), _rem(thread(), 4 * LANES))
            digits, factors, *sums = map(utils.memref_ptr, refs)
            whole = _put(digits, factors, thread_of_row, own)
            for each in sums:
                _put_sum(each, thread_of_row, whole)

        run: Any = put
        run(*own_refs, piece.begin, numbers)

    @property
    def refs(self) -> list[Any]:
        """What there is of them."""
        return [each for each in self if each is not None]


def words_of(digits: Any, group: Any, half: int) -> list[Any]:
    """What a thread multiplies 64 inputs with, of a group's first half or second: two words for each 32.

    Args:
        digits, group: MLIR's.
    """
    lane = _rem(thread(), LANES)
    column = arith.addi(_times(_rem(arith.divui(lane, const(FOUR)), 2), FOUR), _rem(lane, FOUR))
    place = arith.addi(_times(group, _OF_DIGITS), _times(column, FOUR))
    at = utils.getelementptr(utils.memref_ptr(digits), [arith.addi(place, const(half * _OF_DIGITS // 2))], i32())
    words = llvm.load(ir.VectorType.get((FOUR,), i32()), at, alignment=16)
    return [llvm.extractelement(words, const(i)) for i in range(FOUR)]


def thread() -> Any:
    """The block's."""
    return arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x))


def _put(digits: Any, factors: Any, eight: Any, numbers: list[Any]) -> list[Any]:
    """The row's n-th eight numbers; the warp's lanes have those that follow each other.

    Returns:
        The bits of _ROUNDING and each whole number.

    Of each eight a quad's thread has two, which are bytes of one word with those of the eight two further: so these
    eights' threads give each other half of theirs.
    """
    f32 = ir.F32Type.get()
    largest = _absolute(numbers[0])
    for number in numbers[1:]:
        largest = arith.maximumf(largest, _absolute(number))
    for distance in (8, 4, 2, 1):
        largest = arith.maximumf(largest, utils.shfl_bfly(largest, distance))
    shift = arith.divf(_f32(float(LARGEST)), arith.maximumf(largest, _f32(_TINY)))
    whole = [utils.bitcast(llvm.intr_fma(number, shift, _f32(_ROUNDING)), i32()) for number in numbers]
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, _rem(eight, TOGETHER // _VECTOR), const(0))):
        group = arith.divui(eight, const(TOGETHER // _VECTOR))
        factor = arith.mulf(largest, _f32(1.0 / LARGEST))
        llvm.store(factor, utils.getelementptr(factors, [group], f32))
    upper = [arith.shrui(arith.addi(number, const(_HALF_DIGIT)), const(8)) for number in whole]
    pair = _rem(eight, FOUR)
    is_later = arith.cmpi(arith.CmpIPredicate.uge, pair, const(_PAIR))
    inside = _rem(eight, TOGETHER // _VECTOR)
    block = arith.divui(inside, const(FOUR))
    # Of a group: the half, the digit, the quad's thread, the block, whether bits are the upper four.
    place = _times(arith.divui(eight, const(TOGETHER // _VECTOR)), _OF_DIGITS)
    place = arith.addi(place, _times(arith.divui(block, const(2)), _OF_DIGITS // 2))
    place = arith.addi(place, arith.addi(_times(_rem(block, 2), 2), _rem(pair, _PAIR)))
    place = arith.addi(place, arith.select(is_later, const(2 * FOUR), const(0)))
    for digit, own in enumerate((upper, whole)):
        bytes_of_two = [
            _bytes(own[i : i + FOUR]) for i in range(0, _VECTOR, FOUR)
        ]  # of the quad's first two, the others
        given = arith.select(is_later, bytes_of_two[0], bytes_of_two[1])
        kept = arith.select(is_later, bytes_of_two[1], bytes_of_two[0])
        other = utils.shfl_bfly(given, _PAIR)
        first, second = arith.select(is_later, other, kept), arith.select(is_later, kept, other)
        for i, taken in enumerate((0x5140, 0x7362)):
            word = _ptx(f"prmt.b32 $0, $1, $2, {taken:#x};", first, second)
            at = arith.addi(place, const(digit * FOUR * FOUR + i * FOUR))
            llvm.store(word, utils.getelementptr(digits, [at], i32()))
    return whole


def _put_sum(sums: Any, eight: Any, whole: list[Any]) -> None:
    """The sum of 32 whole numbers, of which four of the warp's lanes have eight each."""
    total = functools.reduce(arith.addi, whole, const(-_VECTOR * _ROUNDING_BITS))
    for distance in (2, 1):
        total = arith.addi(total, utils.shfl_bfly(total, distance))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, _rem(eight, FOUR), const(0))):
        llvm.store(total, utils.getelementptr(sums, [arith.divui(eight, const(FOUR))], i32()))


def _bytes(words: list[Any]) -> Any:
    """The lowest bytes of four words in one."""
    halves = [_ptx("prmt.b32 $0, $1, $2, 0x0040;", *words[i : i + 2]) for i in (0, 2)]
    return _ptx("prmt.b32 $0, $1, $2, 0x5410;", *halves)


def _absolute(number: Any) -> Any:
    bits = arith.andi(utils.bitcast(number, i32()), const(0x7FFFFFFF))
    return utils.bitcast(bits, ir.F32Type.get())


def _ptx(text: str, *operands: Any) -> Any:
    return llvm.inline_asm(i32(), list(operands), text, ",".join(["=r"] + ["r"] * len(operands)))


def _f32(value: float) -> Any:
    return arith.constant(ir.F32Type.get(), value)


def _rem(value: Any, by: int) -> Any:
    return arith.remui(value, const(by))


def _times(value: Any, by: int) -> Any:
    return arith.muli(value, const(by))
