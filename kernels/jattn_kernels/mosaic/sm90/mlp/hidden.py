"""Hidden units that blocks leave each other in global memory, two in a word.

A word tells by itself that it is there, as numbers do in `arrivals`: it is 0 before, and two zeros are stored as -0. A
unit of the first product's stores whole sectors of 32 bytes: memory has to read the rest of others first.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.arrivals import polled_words
from jattn_kernels.mosaic.sm90.common.columns import LAYOUT, flat_places
from jattn_kernels.mosaic.sm90.common.tiles import WARPS
from jattn_kernels.mosaic.sm90.common.warp_instructions import const, i32
from jattn_kernels.mosaic.sm90.mlp.compact_row import LANES, thread
from jattn_kernels.mosaic.sm90.mlp.rows import VECTOR
from jattn_kernels.mosaic.sm90.mlp.units import PARTS, SIDE

_OF_UNIT = SIDE // PARTS
_NEITHER = 0x80008000  # the bits of two -0


class HiddenRoom(NamedTuple):
    """Where they are.

    Attributes:
        ref: In global memory; the interpreter has them in their own order, from another launch.
        begin: Flat place of the first, among numbers of 32 bits.
        dtype: Theirs, of 16 bits.
    """

    ref: Any
    begin: int
    dtype: Any

    def store(self, first: Any, numbers: jax.Array) -> None:
        """Some neighbours, from the first one on.

        Args:
            numbers: In 16 bits, each thread's that of its number modulo as many as there are (`columns`).
        """
        if tiles.interpret_params() is not None:
            self.ref[flat_places(self.ref, first, _OF_UNIT)] = numbers[:_OF_UNIT]
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, LAYOUT))
        def put(ctx: Any, ref: Any, first: Any, numbers: Any) -> None:
            del ctx
            own = llvm.extractelement(numbers.registers.item(), const(0))
            bits = arith.extui(i32(), arith.bitcast(ir.IntegerType.get_signless(16), own))
            above = utils.shfl_bfly(bits, 1)
            word = arith.ori(bits, arith.shli(above, const(16)))
            word = arith.select(arith.cmpi(arith.CmpIPredicate.eq, word, const(0)), const(_NEITHER), word)
            number = arith.remui(thread(), const(LANES * WARPS))
            is_even = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(number, const(2)), const(0))
            is_own = arith.cmpi(arith.CmpIPredicate.ult, number, const(_OF_UNIT))
            with mgpu.when(arith.andi(is_even, is_own)):
                place = arith.divui(arith.addi(first.registers.item(), number), const(2))
                at = arith.addi(place, const(self.begin))
                llvm.store(word, utils.getelementptr(utils.memref_ptr(ref), [at], i32()))

        run: Any = put
        run(self.ref, first, numbers)

    def load(self, piece: Any) -> jax.Array:
        """A piece of all in float32, once it is there."""
        if tiles.interpret_params() is not None:
            return piece.load(self.ref).astype(jnp.float32)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
            return_type=plgpu.ShapeDtypeStruct((VECTOR * LANES * WARPS,), jnp.float32, layout=piece.layout),
        )
        def poll(ctx: Any, ref: Any, begin: Any) -> Any:
            del ctx
            own = arith.muli(arith.remui(thread(), const(LANES * WARPS)), const(VECTOR // 2))
            start = arith.addi(arith.addi(arith.divui(begin.registers.item(), const(2)), own), const(self.begin))
            words = polled_words(utils.memref_ptr(ref), [(start, VECTOR // 2)])
            numbers = llvm.mlir_undef(ir.VectorType.get((VECTOR,), ir.F32Type.get()))
            for i in range(VECTOR):
                numbers = llvm.insertelement(numbers, _wide(words[i // 2], i % 2, self.dtype), const(i))
            registers = np.empty((1,), dtype=object)
            registers[0] = numbers
            return mgpu.FragmentedArray(_registers=registers, _layout=piece.layout.to_mgpu(), _is_signed=None)

        run: Any = poll
        return run(self.ref, piece.begin)


def _wide(word: Any, number: int, dtype: Any) -> Any:
    """One of a word's two numbers."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        bits = arith.andi(word, const(0xFFFF0000)) if number else arith.shli(word, const(16))
        return utils.bitcast(bits, ir.F32Type.get())
    half = arith.trunci(ir.IntegerType.get_signless(16), arith.shrui(word, const(16)) if number else word)
    return arith.extf(ir.F32Type.get(), arith.bitcast(ir.F16Type.get(), half))
