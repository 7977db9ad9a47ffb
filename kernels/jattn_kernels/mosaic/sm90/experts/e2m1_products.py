"""Products of weights in e2m1, made float16 in registers, with few rows in float16: each warp on its own.

A number of e2m1 is one of float16 with its exponent's bits apart from its sign, times 2^14, and its bits all lie in the
upper byte: eleven instructions for eight of them, nine of these where logic is done. A thread's product (mma.sync,
16 x 8 x 16) waits for no other warp, and its sum of 32 inputs is multiplied with their scale in float32.

Of a stage a warp has 16 columns, and all of its depth. The sums stand in wgmma's layout.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.common.warp_instructions import (
    const,
    i32,
    matrices,
    multiplied,
    pair,
    register_place,
    two,
)
from jattn_kernels.mosaic.sm90.experts.e2m1 import power_of_two
from jattn_kernels.mxfp4 import GROUP, codes_of

FACTOR = 2.0**14  # of the numbers that float16 makes of these bits
ORDER = (3, 7, 1, 5, 2, 6, 0, 4)  # of eight inputs, as a word of weights gives them: two by two
_LANES, _EIGHT = 32, 8
_GROUP_BYTES = GROUP // 2
_TILE = 16  # columns of a product
_SIGNS, _NUMBERS = 0x80808080, 0x0E0E0E0E  # of a byte: the sign, the lower exponent and the upper mantissa bit
_UPPER = 0xFF00FF00
_LOWER_BYTES_UP = 0x2404  # of a word and a zero: what prmt takes
_TO_FLOAT32 = 1 << 23


def stage_added(total: jax.Array, weights: Any, scales: Any, x: Any) -> jax.Array:
    """The sums with a stage's products, each times its scale; 2^-14 of them.

    Args:
        total: (64, rows), of 8 or 16 rows.
        weights: (parts, 64 / parts, bytes), in shared memory.
        scales: (groups and those left free, parts, 64 / parts), likewise.
        x: (groups, rows or more, 32), likewise, as `put_in_float16` puts them.
    """
    if tiles.interpret_params() is not None:
        return _interpreted(total, weights, scales, x)
    layout: Any = plgpu.Layout.WGMMA
    ref = plgpu.RefType()

    @plgpu.inline_mgpu(
        arg_types=(layout, ref, ref, ref),
        return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=layout),
    )
    def add(ctx: Any, total: Any, weights: Any, scales: Any, x: Any) -> Any:
        del ctx
        return _added(total, weights, scales, x)

    run: Any = add
    return run(total, weights, scales, x)


def store_sums(total: jax.Array, target: Any) -> None:
    """target[:, : rows] = total.

    Args:
        target: (64, rows and some left free), in shared memory.
    """
    if tiles.interpret_params() is not None:
        target[:, pl.ds(0, total.shape[1])] = total
        return
    width = target.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(ctx: Any, target: Any, total: Any) -> None:
        del ctx
        thread = arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x))
        row, four = _div(_rem(thread, _LANES), 4), _rem(thread, 4)
        row = arith.addi(row, _times(_rem(_div(thread, _LANES), WARPS), _TILE))
        pointer = utils.memref_ptr(target)
        own = utils.getelementptr(pointer, [arith.addi(_times(row, width), _times(four, 2))], ir.F32Type.get())
        for (_, eight, _, _, half, *_), register in np.ndenumerate(total.registers):
            offset = const(half * _EIGHT * width + eight * _EIGHT)
            llvm.store(register, utils.getelementptr(own, [offset], ir.F32Type.get()), alignment=8)

    run: Any = store
    run(target, total)


def _interpreted(total: jax.Array, weights: Any, scales: Any, x: Any) -> jax.Array:
    width, rows = weights.shape[-1], total.shape[1]
    numbers = float16_numbers(weights[...].reshape(WGMMA_ROWS, width)).reshape(WGMMA_ROWS, -1, GROUP)
    groups = numbers.shape[1]
    of_rows = x[...][:, :rows].astype(jnp.float32)
    factors = power_of_two(scales[...][:groups].reshape(-1)).reshape(groups, WGMMA_ROWS)
    plgpu.commit_smem()  # before a copy overwrites what has been read
    products = jnp.einsum("cgk,grk->gcr", numbers, of_rows, precision=lax.Precision.HIGHEST)
    return total + jnp.sum(products * factors[..., None], axis=0)


def float16_numbers(weights: Any) -> jax.Array:
    """2^-14 of them, in float32, under the interpreter."""
    codes = codes_of(weights).astype(jnp.int32)
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32)


def _added(total: Any, weights: Any, scales: Any, x: Any) -> Any:
    width, rows = weights.type.shape[-1], x.type.shape[1]
    groups, eights = width // _GROUP_BYTES, total.shape[1] // _EIGHT
    thread = arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x))
    lane, warp = _rem(thread, _LANES), _rem(_div(thread, _LANES), WARPS)
    row, four = _div(lane, 4), _rem(lane, 4)
    first_column = _times(warp, _TILE)
    pointers = [utils.memref_ptr(ref) for ref in (weights, scales, x)]

    # Of each 16 columns two matrices of 8 x 16 bytes: a thread has four bytes of a row of each.
    word = _byte(pointers[0], _times(arith.addi(first_column, _rem(lane, _TILE)), width))
    word = _byte(word, _times(_div(lane, _TILE), _GROUP_BYTES))
    scale = _byte(pointers[1], arith.addi(first_column, row))
    of_x = _byte(pointers[2], arith.addi(_times(row, 2 * GROUP), _times(four, 2 * _EIGHT)))

    sums = [
        [number for half in range(2) for number in two(total.registers[register_place(0, eight, half)])]
        for eight in range(eights)
    ]
    loaded: dict[int, list[Any]] = {}
    for group in range(groups):
        if group not in loaded:
            together = min(2, groups - group)
            words = matrices(_byte(word, const(group * _GROUP_BYTES)), 2 * together)
            loaded |= {group + i: words[2 * i : 2 * i + 2] for i in range(together)}
        of_rows = [_four_words(of_x, (group * rows + eight * _EIGHT) * 2 * GROUP) for eight in range(eights)]
        factors = [factor_at(scale, group * WGMMA_ROWS + half * _EIGHT) for half in range(2)]
        sums = added_products(sums, loaded.pop(group), of_rows, factors)
    registers = total.registers.copy()
    for eight in range(eights):
        for half in range(2):
            registers[register_place(0, eight, half)] = pair(*sums[eight][2 * half : 2 * half + 2])
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def added_products(sums: list[Any], words: list[Any], of_rows: list[Any], factors: list[Any]) -> list[Any]:
    """The sums of each eight rows with those of 16 columns and a group of 32 inputs.

    Args:
        sums: Four numbers of a thread, of each eight.
        words: Eight weights of the upper eight columns, and of the lower.
        of_rows: Four words of a thread, of each eight rows.
        factors: Of the upper eight columns and of the lower, a thread's.
    """
    upper, lower = (float16_words(word) for word in words)
    added = []
    for before, rows in zip(sums, of_rows, strict=True):
        found = [arith.constant(ir.F32Type.get(), 0.0)] * 4
        for k in (0, 2):
            found = multiplied([upper[k], lower[k], upper[k + 1], lower[k + 1]], rows[k : k + 2], found, "f16")
        pairs = enumerate(zip(found, before, strict=True))
        added.append([llvm.intr_fma(number, factors[i // 2], old) for i, (number, old) in pairs])
    return added


def float16_words(word: Any) -> list[Any]:
    """Eight numbers of four bits, two by two, in `ORDER`."""

    def spread(of_signs: Any, of_numbers: Any) -> list[Any]:
        numbers = arith.andi(of_numbers, const(_NUMBERS))
        in_bytes = arith.ori(arith.andi(of_signs, const(_SIGNS)), numbers)
        lower = _ptx(f"prmt.b32 $0, $1, $2, {_LOWER_BYTES_UP};", in_bytes, const(0))
        return [arith.andi(in_bytes, const(_UPPER)), lower]

    odd = spread(word, arith.shrui(word, const(3)))
    even = spread(*(_ptx(f"mul.lo.u32 $0, $1, {by};", word) for by in (16, 2)))  # where sums are done, not logic
    return odd + even


def factor_at(scale: Any, offset: int) -> Any:
    """A scale, in float32."""
    exponent = arith.extui(i32(), llvm.load(_i8(), _byte(scale, const(offset))))
    return utils.bitcast(_ptx(f"mul.lo.u32 $0, $1, {_TO_FLOAT32};", exponent), ir.F32Type.get())


def _four_words(pointer: Any, offset: int) -> list[Any]:
    words = llvm.load(ir.VectorType.get((4,), i32()), _byte(pointer, const(offset)), alignment=16)
    return [llvm.extractelement(words, const(i)) for i in range(4)]


def _ptx(text: str, *operands: Any) -> Any:
    return llvm.inline_asm(i32(), list(operands), text, ",".join(["=r"] + ["r"] * len(operands)))


def _byte(pointer: Any, offset: Any) -> Any:
    return utils.getelementptr(pointer, [offset], _i8())


def _div(value: Any, by: int) -> Any:
    return arith.divui(value, const(by))


def _rem(value: Any, by: int) -> Any:
    return arith.remui(value, const(by))


def _times(value: Any, by: int) -> Any:
    return arith.muli(value, const(by))


def _i8() -> Any:
    return ir.IntegerType.get_signless(8)


assert tuple(odd + 4 * half for odd in (3, 1, 2, 0) for half in range(2)) == ORDER
assert TILED_ROWS == _EIGHT
