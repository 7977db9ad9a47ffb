"""Weights of 4 bits made wider in registers, where they lie in the order that costs the fewest instructions.

A thread reads 8 neighbouring weights at once. The tensor cores want pairs of each thread: numbers i and i + 4 of its 8
are one, as a mask takes them out of 32 bits together. So they multiply the depth in another order, 32 at a time, in
which the rows of x have to lie: `in_order`.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Shaped

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.shared_row import constant, store_share

_THREADS, _PAIRS, _INPUTS = 4, 4, 32  # of a row's 32 weights; of a thread's 8
# 128 + 8 in bfloat16, 1024 + 8 in float16, twice: the bits of a weight, its sign turned, count up from 8 less.
_BASES = {"bfloat16": 0x43084308, "float16": 0x64086408}
_HALVES = (0x5410, 0x7632)  # of two words, which `prmt` makes one: both lower ones, both upper ones
_SUBTRACT = {"bfloat16": "sub.bf16x2", "float16": "sub.rn.f16x2"}


def in_order(x: Shaped[Array, "R D"]) -> Shaped[Array, "R D"]:
    """Columns in the order in which the weights of 4 bits are multiplied."""
    blocks = x.reshape(x.shape[0], -1, _THREADS, 2, _PAIRS)
    return blocks.transpose(0, 1, 4, 2, 3).reshape(x.shape)


def store_in_order(target: Any, begin: Any, values: jax.Array, width: int) -> None:
    """A share of a row in that order, as `store_share` stores it."""
    if tiles.interpret_params() is not None:
        target[0, pl.ds(begin, values.shape[0])] = in_order(values[None])[0]
        return

    def words(register: Any, column: Any) -> list[tuple[Any, Any]]:
        i32 = ir.IntegerType.get_signless(32)
        bits = utils.bitcast(register, ir.VectorType.get((_PAIRS,), i32))
        pairs = [llvm.extractelement(bits, constant(i)) for i in range(_PAIRS)]
        block, inner = (op(column, constant(_INPUTS)) for op in (arith.divui, arith.remui))
        first = arith.addi(arith.muli(block, constant(_INPUTS)), arith.divui(inner, constant(_PAIRS)))
        return [
            (
                arith.addi(first, constant(number * 2 * _THREADS)),
                llvm.inline_asm(
                    i32,
                    [pairs[number // 2], pairs[number // 2 + 2]],
                    f"prmt.b32 $0, $1, $2, {_HALVES[number % 2]};",
                    "=r,r,r",
                ),
            )
            for number in range(_PAIRS)
        ]

    store_share(target, begin, values, width, words)


def load_packed(weights: Any) -> jax.Array:
    """A tile of weights of 4 bits, (64, depth), from shared memory."""
    return plgpu.load(weights, layout=plgpu.Layout.WGMMA_UPCAST_4X, optimized=False)


def unpacked(packed: jax.Array, begin: int, depth: int, dtype: Any) -> jax.Array:
    """Some inputs' weights in that order, as the tensor cores take them from registers.

    Args:
        packed: As `load_packed` has loaded it.
        begin, depth: Of the inputs, multiples of 32.
        dtype: bfloat16 or float16.
    """
    if tiles.interpret_params() is not None:
        return in_order(packed[:, begin : begin + depth]).astype(dtype)
    name, shape = jnp.dtype(dtype).name, (packed.shape[0], depth)
    base, subtract, first = _BASES[name], _SUBTRACT[name], begin // _INPUTS

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_UPCAST_4X,),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA),
    )
    def widen(ctx: Any, packed: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get() if name == "bfloat16" else ir.F16Type.get())
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        own = packed.registers[:, first : first + depth // _INPUTS]
        for (row, block, *rest), register in np.ndenumerate(own):
            bits = utils.bitcast(register, i32)
            for number in range(_PAIRS):
                shifted = arith.shrui(bits, arith.constant(i32, 4 * number)) if number else bits
                wide = llvm.inline_asm(
                    i32,
                    [shifted],
                    f"{{ .reg .b32 bits, base; lop3.b32 bits, $1, 0x000F000F, {base}, (0xf0 & 0xcc) ^ 0xaa; "
                    f"mov.b32 base, {base}; {subtract} $0, bits, base; }}",
                    "=r,r",
                )
                registers[(row, block * _PAIRS + number, *rest[:-1])] = utils.bitcast(wide, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    run: Any = widen
    return run(packed)
