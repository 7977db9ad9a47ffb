"""Weights in e2m1, two a byte, made fp8 in registers: seven instructions for eight of them.

A number of e2m1 is one of e4m3 with its exponent's bits apart from its sign, times 64: bits move, and nothing is
computed. A thread takes the first numbers of its four bytes together and the second ones together, so that 32 inputs
are multiplied in another order, in which rows have to lie: `in_order`.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float32, Shaped, UInt8

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mxfp4 import GROUP, codes_of
from jattn_kernels.quantized import FP8, NUMBERS_OF_BYTE

FACTOR = 64.0  # of the numbers that e4m3 makes of these bits
_THREADS, _BYTES = 4, 4  # of a row's 32 inputs; of a thread
_SIGNS, _NUMBERS = 0x80808080, 0x1C1C1C1C  # of e4m3: where a sign is, and the lower exponent and upper mantissa bits
_MANTISSA = 23


def in_order(x: Shaped[Array, "R D"]) -> Shaped[Array, "R D"]:
    """Columns in the order in which weights of 4 bits are multiplied."""
    blocks = x.reshape(x.shape[0], -1, _THREADS, _BYTES, NUMBERS_OF_BYTE)
    return blocks.transpose(0, 1, 4, 2, 3).reshape(x.shape)


def power_of_two(exponents: UInt8[Array, " F"]) -> Float32[Array, " F"]:
    """What bytes of e8m0 stand for; 0 of the least, 2^-127."""
    return jax.lax.bitcast_convert_type(exponents.astype(jnp.int32) << _MANTISSA, jnp.float32)


def as_fp8(weights: Any) -> jax.Array:
    """A tile of weights in that order, 1 / 64 of themselves, as the tensor cores take them from registers.

    Args:
        weights: (64, bytes), in shared memory.
    """
    if tiles.interpret_params() is not None:
        codes = codes_of(weights[...]).astype(jnp.int32)
        numbers = ((codes & 8) << 4) | ((codes & 7) << 2)
        return in_order(jax.lax.bitcast_convert_type(numbers.astype(jnp.uint8), FP8))
    layout: Any = plgpu.Layout.WGMMA_8BIT
    rows, width = weights.shape
    shape = rows, width * NUMBERS_OF_BYTE

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, FP8, layout=layout))
    def widen(ctx: Any, packed: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        fp8 = ir.VectorType.get((_BYTES,), ir.Float8E4M3FNType.get())
        registers = np.empty(mgpu.WGMMA_LAYOUT_8BIT.registers_shape(shape), dtype=object)

        def both(bits: Any, to_sign: int, to_numbers: int) -> Any:
            def moved(by: int, mask: int) -> Any:
                by_bits = arith.constant(i32, abs(by))
                turned = (arith.shli if by > 0 else arith.shrui)(bits, by_bits) if by else bits
                return arith.andi(turned, arith.constant(i32, mask - (1 << 32) if mask >> 31 else mask))

            return utils.bitcast(arith.ori(moved(to_sign, _SIGNS), moved(to_numbers, _NUMBERS)), fp8)

        for (row, block, *rest), register in np.ndenumerate(packed.registers):
            bits = utils.bitcast(register, i32)
            registers[(row, NUMBERS_OF_BYTE * block, *rest)] = both(bits, 4, 2)
            registers[(row, NUMBERS_OF_BYTE * block + 1, *rest)] = both(bits, 0, -2)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT_8BIT, _is_signed=None)

    run: Any = widen
    return run(plgpu.load(weights, layout=layout, optimized=False))


assert GROUP == _THREADS * _BYTES * NUMBERS_OF_BYTE
