"""Sums that blocks of a grid store in global memory and others wait for: each number tells by itself that it is there.

The memory is 0 before, not -0, and no number that is stored is: 0 is stored as -0. So whoever polls has what it waits
for once it sees it, where a count would cost a fence, an atomic, and another read. All blocks must run at a time, as
for `all_blocks`.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.indexed import gather

NEVER_ZERO = -(1 << 31)  # the bits of -0
_MOST_AT_ONCE = 4  # numbers of a load
_WHOLE_WARP = 0xFFFFFFFF


class Sums(NamedTuple):
    """Splits of a row, float32.

    Attributes:
        ref: In global memory; 0 where they will be, on a GPU. The interpreter has them whole, from another launch.
        begin: Flat place of the first.
        stride: From one split to the next.
        splits: How many.
    """

    ref: Any
    begin: int
    stride: int
    splits: int

    def added_up(self, places: jax.Array, layout: Any) -> jax.Array:
        """The sum of the splits, in their order, once they are there.

        Args:
            places: In the row, int32 of this layout; those that a register has lie side by side.
        """
        if tiles.interpret_params() is not None:
            parts = [gather(self.ref, places + (self.begin + i * self.stride), layout) for i in range(self.splits)]
            return sum(parts[1:], parts[0])

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), layout),
            return_type=plgpu.ShapeDtypeStruct(places.shape, jnp.float32, layout=layout),
        )
        def poll(ctx: Any, ref: Any, places: Any) -> Any:
            del ctx
            registers = places.registers.copy()
            firsts = [_first(register) for register in registers.flat]
            width = _width(registers.flat[0].type)
            numbers = self._polled(utils.memref_ptr(ref), firsts, width)
            for i in range(len(firsts)):
                of_register = numbers[i * width : (i + 1) * width]
                registers.flat[i] = vector.from_elements(ir.VectorType.get((width,), ir.F32Type.get()), of_register)
            return mgpu.FragmentedArray(_registers=registers, _layout=places.layout, _is_signed=None)

        run: Any = poll
        return run(self.ref, places)

    def _polled(self, pointer: Any, firsts: list[Any], width: int) -> list[Any]:
        """For each place the numbers from there on, added up."""
        at_once = min(width, _MOST_AT_ONCE)
        starts = [
            (arith.addi(first, _constant(self.begin + split * self.stride + number)), at_once)
            for split in range(self.splits)
            for first in firsts
            for number in range(0, width, at_once)
        ]
        numbers = _polled(pointer, starts)
        of_split = len(firsts) * width
        sums = numbers[:of_split]
        for split in range(1, self.splits):
            parts = numbers[split * of_split : (split + 1) * of_split]
            sums = [arith.addf(total, part) for total, part in zip(sums, parts, strict=True)]
        return sums


def arrived(source: Any, places: list[jax.Array], layouts: list[Any]) -> list[jax.Array]:
    """source[places[i]] of some arrays of places, once all numbers are there.

    Args:
        source: In global memory, by its flat places; as `Sums.ref`.
        places: int32 of these layouts; those that a register has lie side by side.
    """
    if tiles.interpret_params() is not None:
        return [gather(source, each, layout) for each, layout in zip(places, layouts, strict=True)]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *layouts),
        return_type=[
            plgpu.ShapeDtypeStruct(each.shape, jnp.float32, layout=layout)
            for each, layout in zip(places, layouts, strict=True)
        ],
    )
    def poll(ctx: Any, ref: Any, *places: Any) -> Any:
        del ctx
        registers = [register for each in places for register in each.registers.flat]
        starts = [
            (arith.addi(_first(register), _constant(number)), min(_width(register.type), _MOST_AT_ONCE))
            for register in registers
            for number in range(0, _width(register.type), _MOST_AT_ONCE)
        ]
        numbers, f32, results = iter(_polled(utils.memref_ptr(ref), starts)), ir.F32Type.get(), []
        for each in places:
            filled = each.registers.copy()
            for i, register in enumerate(filled.flat):
                of_register = [next(numbers) for _ in range(_width(register.type))]
                is_vector = isinstance(register.type, ir.VectorType)
                kind = ir.VectorType.get((len(of_register),), f32)
                filled.flat[i] = vector.from_elements(kind, of_register) if is_vector else of_register[0]
            results.append(mgpu.FragmentedArray(_registers=filled, _layout=each.layout, _is_signed=None))
        return results

    run: Any = poll
    return run(source, *places)


def _polled(pointer: Any, starts: list[tuple[Any, int]]) -> list[Any]:
    """As `polled_words`, in float32."""
    return [arith.bitcast(ir.F32Type.get(), word) for word in polled_words(pointer, starts)]


def polled_words(pointer: Any, starts: list[tuple[Any, int]]) -> list[Any]:
    """As many words from each place on as is said with it, read until none is 0."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    pointers = [(utils.getelementptr(pointer, [start], f32), count) for start, count in starts]
    loop = scf.WhileOp([i32] * sum(count for _, count in starts), [])
    with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
        bits = [number for place, count in pointers for number in _loaded(place, count)]
        zero = _constant(0)
        missing = arith.cmpi(arith.CmpIPredicate.eq, bits[0], zero)
        for number in bits[1:]:
            missing = arith.ori(missing, arith.cmpi(arith.CmpIPredicate.eq, number, zero))
        scf.condition(_in_any_lane(missing), bits)
    with ir.InsertionPoint.at_block_begin(loop.after.blocks.append(*([i32] * len(bits)))):
        scf.yield_([])
    return list(loop.results)


def never_zero(numbers: jax.Array) -> jax.Array:
    """The bits of float32 numbers as they are stored for who polls; in the interpreter the numbers."""
    if tiles.interpret_params() is not None:
        return numbers
    bits = lax.bitcast_convert_type(numbers, jnp.int32)
    return jnp.where(bits == 0, NEVER_ZERO, bits)


def _loaded(place: Any, count: int) -> list[Any]:
    """So many 32-bit words, read anew."""
    i32 = ir.IntegerType.get_signless(32)
    if count == 1:
        return [utils.inline_ptx("ld.relaxed.gpu.global.b32 $0, [$1];", place, result_types=i32, has_side_effects=True)]
    words = ", ".join(f"${i}" for i in range(count))
    ptx = f"ld.relaxed.gpu.global.v{count}.b32 {{{words}}}, [${count}];"
    return list(utils.inline_ptx(ptx, place, result_types=[i32] * count, has_side_effects=True))


def _in_any_lane(condition: Any) -> Any:
    """Whether it holds in some lane of the warp, whose lanes so stay together."""
    i32 = ir.IntegerType.get_signless(32)
    ptx = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, {_WHOLE_WARP:#x}; selp.b32 $0, 1, 0, p; }}"
    word = arith.extui(i32, condition)
    found = utils.inline_ptx(ptx, word, result_types=i32, has_side_effects=True, convergent=True)
    return arith.cmpi(arith.CmpIPredicate.ne, found, _constant(0))


def _constant(value: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _width(kind: Any) -> int:
    return ir.VectorType(kind).shape[0] if isinstance(kind, ir.VectorType) else 1


def _first(register: Any) -> Any:
    """The first of a register's numbers."""
    if not isinstance(register.type, ir.VectorType):
        return register
    return vector.extract(register, dynamic_position=[], static_position=[0])
