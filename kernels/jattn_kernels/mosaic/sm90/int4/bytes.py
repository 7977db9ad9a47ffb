"""Weights of 4 bits made fp8 in registers: three instructions for eight of them.

A byte of 0 up to 15 is that number times 2^-9 in e4m3, subnormal numbers and first binade being evenly spaced; so the
tensor cores take a weight's bits, its sign turned, as the weight plus 8. A thread reads 8 neighbouring weights: the even
ones are four bytes, the odd ones four others, in the order of weights in e2m1 (`in_order` of it).
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

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.experts.e2m1 import in_order
from jattn_kernels.quantized import FP8

UNIT = 2.0**-9  # what e4m3 makes of 1
OFFSET = 8  # what weights are more than they should be
_NUMBERS, _SIGNS = 0x0F0F0F0F, 0x08080808
_NUMBERS_OF_WORD = 4


def as_fp8(weights: Any) -> jax.Array:
    """A tile of weights in that order, each (weight + OFFSET) * UNIT, as the tensor cores take them from registers.

    Args:
        weights: (64, depth) of int4, in shared memory.
    """
    if tiles.interpret_params() is not None:
        return in_order((weights[...].astype(jnp.float32) + OFFSET) * UNIT).astype(FP8)
    packed_layout, layout, shape = plgpu.Layout.WGMMA_UPCAST_4X, plgpu.Layout.WGMMA_8BIT, weights.shape

    @plgpu.inline_mgpu(arg_types=(packed_layout,), return_type=plgpu.ShapeDtypeStruct(shape, FP8, layout=layout))
    def widen(ctx: Any, packed: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        fp8 = ir.VectorType.get((_NUMBERS_OF_WORD,), ir.Float8E4M3FNType.get())
        numbers, signs, half = (arith.constant(i32, value) for value in (_NUMBERS, _SIGNS, 4))
        registers = np.empty(mgpu.WGMMA_LAYOUT_8BIT.registers_shape(shape), dtype=object)
        for (row, block, *rest), register in np.ndenumerate(packed.registers):
            bits = utils.bitcast(register, i32)
            for odd, moved in enumerate((bits, arith.shrui(bits, half))):
                word = arith.xori(arith.andi(moved, numbers), signs)
                registers[(row, 2 * block + odd, *rest[: registers.ndim - 2])] = utils.bitcast(word, fp8)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT_8BIT, _is_signed=None)

    run: Any = widen
    return run(plgpu.load(weights, layout=packed_layout, optimized=False))
