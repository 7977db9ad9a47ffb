"""Weights of 4 bits made wider in registers, where they lie in the order that costs the fewest instructions.

That order is told in `interleaved.py`. Weights that are not in it are multiplied with rows that are instead.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jattn_kernels.interleaved import INPUTS, in_turn
from jattn_kernels.mosaic.sm90.common import tiles

_PAIRS = 4  # of a thread's 8 weights
# 128 + 8 in bfloat16, 1024 + 8 in float16, twice: the bits of a weight, its sign turned, count up from 8 less.
_BASES = {"bfloat16": 0x43084308, "float16": 0x64086408}
_MIDDLES = {"bfloat16": 136.0, "float16": 1032.0}  # the same as numbers
_SUBTRACT = {"bfloat16": "sub.bf16x2", "float16": "sub.rn.f16x2"}


def packed_tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory whose rows of 64 or 128 bytes lie so that threads read 8 without waiting for each other."""
    tiling: Any = plgpu.TilingTransform  # typed as abstract
    swizzling: Any = plgpu.SwizzleTransform
    depth = shape[-1]
    return plgpu.SMEM(shape, dtype, transforms=(tiling((tiles.TILED_ROWS, depth)), swizzling(depth // 2)))


def load_packed(weights: Any) -> jax.Array:
    """A tile of weights of 4 bits, (64, depth), from shared memory."""
    return plgpu.load(weights, layout=plgpu.Layout.WGMMA_UPCAST_4X, optimized=False)


def load_zero_points(zero_points: Any) -> jax.Array:
    """A tile's zero points of a group, (64,), from shared memory."""
    return plgpu.load(zero_points, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def unpacked(packed: jax.Array, begin: int, depth: int, dtype: Any, zero_points: jax.Array | None = None) -> jax.Array:
    """Some inputs' weights in turn, if they are interleaved, as the tensor cores take them from registers.

    Args:
        packed: As `load_packed` has loaded it.
        begin, depth: Of the inputs, multiples of 32.
        dtype: bfloat16 or float16.
        zero_points: What is taken from them, as `load_zero_points` has loaded it; None is 0. A number is taken from the
            bits in any case: what they cost is to be there and in the weights' dtype, once for all of these inputs.
    """
    if tiles.interpret_params() is not None:
        weights = in_turn(packed[:, begin : begin + depth]).astype(dtype)
        return weights if zero_points is None else weights - zero_points.astype(dtype)[:, None]
    name, shape = jnp.dtype(dtype).name, (packed.shape[0], depth)
    base, subtract, first = _BASES[name], _SUBTRACT[name], begin // INPUTS

    of_rows = () if zero_points is None else (plgpu.Layout.WGMMA.reduce(1),)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_UPCAST_4X, *of_rows),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA),
    )
    def widen(ctx: Any, packed: Any, *zero_points: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        taken = [_with_middle(each.registers[0, 0, half, 0, 0], name) for each in zero_points for half in range(2)]
        pair = ir.VectorType.get((2,), _kind(name))
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        own = packed.registers[:, first : first + depth // INPUTS]
        for (row, block, *rest), register in np.ndenumerate(own):
            bits = utils.bitcast(register, i32)
            for number in range(_PAIRS):
                shifted = arith.shrui(bits, arith.constant(i32, 4 * number)) if number else bits
                own_taken = [taken[rest[2]]] if taken else []
                wide = llvm.inline_asm(
                    i32,
                    [shifted, *own_taken],
                    f"{{ .reg .b32 bits, base; lop3.b32 bits, $1, 0x000F000F, {base}, (0xf0 & 0xcc) ^ 0xaa; "
                    f"mov.b32 base, {'$2' if taken else base}; {subtract} $0, bits, base; }}",
                    "=r,r,r" if taken else "=r,r",
                )
                registers[(row, block * _PAIRS + number, *rest[:-1])] = utils.bitcast(wide, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    run: Any = widen
    return run(packed) if zero_points is None else run(packed, zero_points)


def _with_middle(register: Any, dtype: str) -> Any:
    """What is taken from the bits of weights with a zero point, twice; exact for each from -128 to 120."""
    i32, f32, kind = ir.IntegerType.get_signless(32), ir.F32Type.get(), _kind(dtype)
    own = arith.sitofp(f32, llvm.extractelement(register, arith.constant(i32, 0)))
    number = arith.truncf(kind, arith.addf(own, arith.constant(f32, _MIDDLES[dtype])))
    bits = arith.extui(i32, arith.bitcast(ir.IntegerType.get_signless(16), number))
    return arith.muli(bits, arith.constant(i32, 0x00010001))


def _kind(dtype: str) -> Any:
    return ir.BF16Type.get() if dtype == "bfloat16" else ir.F16Type.get()
