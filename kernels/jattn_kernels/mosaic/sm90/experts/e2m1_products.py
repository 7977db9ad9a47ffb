"""Products of weights in e2m1, made float16 in registers, with few rows in float16: each warp on its own.

A number of e2m1 is one of float16 with its exponent's bits apart from its sign, times 2^14, and its bits all lie in the
upper byte: eleven instructions for eight of them, nine of these where logic is done. A thread's product (mma.sync,
16 x 8 x 16) waits for no other warp, and its sum of 32 inputs is multiplied with their scale in float32.

Of a stage a warp has some columns and a share of the depth:

  shares 1                16 columns a warp, all of the depth
  shares 2                32 columns, half of it: what is read of the rows serves twice as many weights

The sums stand in wgmma's layout as (64 * shares, rows), in which row 64 b + 16 w + i is column 16 b + i of the warp's
(`place_of`).
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


def place_of(column: Any, share: int, shares: int) -> Any:
    """The row of the sums in which a column's are, of a share of the depth."""
    warps = WARPS // shares
    of_warp = column // (_TILE * shares)
    return column // _TILE % shares * WGMMA_ROWS + (of_warp + warps * share) * _TILE + column % _TILE


def stage_added(total: jax.Array, weights: Any, scales: Any, x: Any, *, shares: int) -> jax.Array:
    """The sums with a stage's products, each times its scale; 2^-14 of them.

    Args:
        total: (64 * shares, rows), of 8 or 16 rows.
        weights: (shares, parts, 64 / parts, bytes), in shared memory.
        scales: (shares * groups and those left free, parts, 64 / parts), likewise.
        x: (shares * groups, rows or more, 32), likewise, as `put_rows_in_float16` puts them; or one row, that all are.
    """
    if tiles.interpret_params() is not None:
        return _interpreted(total, weights, scales, x, shares)
    layout: Any = plgpu.Layout.WGMMA
    ref = plgpu.RefType()

    @plgpu.inline_mgpu(
        arg_types=(layout, ref, ref, ref),
        return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=layout),
    )
    def add(ctx: Any, total: Any, weights: Any, scales: Any, x: Any) -> Any:
        del ctx
        return _added(total, weights, scales, x, shares)

    run: Any = add
    return run(total, weights, scales, x)


def store_sums(total: jax.Array, target: Any) -> None:
    """target[:, : rows] = total.

    Args:
        target: (64 * shares, rows and some left free), in shared memory.
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
        for (tile, eight, _, _, half, *_), register in np.ndenumerate(total.registers):
            offset = const((tile * WGMMA_ROWS + half * _EIGHT) * width + eight * _EIGHT)
            llvm.store(register, utils.getelementptr(own, [offset], ir.F32Type.get()), alignment=8)

    run: Any = store
    run(target, total)


def _interpreted(total: jax.Array, weights: Any, scales: Any, x: Any, shares: int) -> jax.Array:
    width, rows = weights.shape[-1], total.shape[1]
    codes = codes_of(weights[...].reshape(shares, WGMMA_ROWS, width)).astype(jnp.int32)
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    numbers = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32)
    numbers = numbers.reshape(shares, WGMMA_ROWS, -1, GROUP)
    groups = numbers.shape[2]
    of_rows = x[...][:, :rows].astype(jnp.float32)
    of_rows = jnp.broadcast_to(of_rows, (len(of_rows), rows, GROUP)).reshape(shares, groups, rows, GROUP)
    exponents = scales[...][: shares * groups].reshape(-1)
    factors = power_of_two(exponents).reshape(shares, groups, WGMMA_ROWS)
    plgpu.commit_smem()  # before a copy overwrites what has been read
    products = jnp.einsum("scgk,sgrk->sgcr", numbers, of_rows, precision=lax.Precision.HIGHEST)
    sums = jnp.sum(products * factors[..., None], axis=1)
    in_tiles = sums.reshape(shares, WARPS // shares, shares, _TILE, rows)
    return total + in_tiles.transpose(2, 0, 1, 3, 4).reshape(total.shape)


def _added(total: Any, weights: Any, scales: Any, x: Any, shares: int) -> Any:
    width, rows = weights.type.shape[-1], x.type.shape[1]
    groups = width // _GROUP_BYTES
    warps, eights = WARPS // shares, total.shape[1] // _EIGHT
    thread = arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x))
    lane, warp = _rem(thread, _LANES), _rem(_div(thread, _LANES), WARPS)
    row, four = _div(lane, 4), _rem(lane, 4)
    share, first_column = _div(warp, warps), _times(_rem(warp, warps), _TILE * shares)
    first_group = _times(share, groups)
    pointers = [utils.memref_ptr(ref) for ref in (weights, scales, x)]

    # Of each 16 columns two matrices of 8 x 16 bytes: a thread has four bytes of a row of each.
    matrix_row = arith.addi(_times(share, WGMMA_ROWS), arith.addi(first_column, _rem(lane, _TILE)))
    word = _byte(pointers[0], _times(matrix_row, width))
    second = _times(_div(lane, _TILE), _TILE * width if shares > 1 else _GROUP_BYTES)
    word = _byte(word, second)
    scale = _byte(pointers[1], arith.addi(_times(first_group, WGMMA_ROWS), arith.addi(first_column, row)))
    place = _times(first_group, rows)
    if rows > 1:
        place = arith.addi(place, row)
    of_x = _byte(pointers[2], arith.addi(_times(place, 2 * GROUP), _times(four, 2 * _EIGHT)))

    sums = [
        [
            [number for half in range(2) for number in two(total.registers[register_place(tile, eight, half)])]
            for tile in range(shares)
        ]
        for eight in range(eights)
    ]
    loaded: dict[tuple[int, int], list[Any]] = {}
    for group in range(groups):
        if shares > 1:
            words = matrices(_byte(word, const(group * _GROUP_BYTES)), 4)
            loaded |= {(group, tile): words[2 * tile : 2 * tile + 2] for tile in range(2)}
        elif group % 2 == 0:
            words = matrices(_byte(word, const(group * _GROUP_BYTES)), 4 if group + 1 < groups else 2)
            loaded |= {(group + i, 0): words[2 * i : 2 * i + 2] for i in range(len(words) // 2)}
        of_rows = [_four_words(of_x, (group * rows + eight * _EIGHT) * 2 * GROUP) for eight in range(eights)]
        for tile in range(shares):
            upper, lower = (_float16(each) for each in loaded.pop((group, tile)))
            factors = [_factor(scale, group * WGMMA_ROWS + tile * _TILE + half * _EIGHT) for half in range(2)]
            for eight in range(eights):
                found = [_zero()] * 4
                for k in (0, 2):
                    own = [upper[k], lower[k], upper[k + 1], lower[k + 1]]
                    found = multiplied(own, of_rows[eight][k : k + 2], found, "f16")
                before = sums[eight][tile]
                sums[eight][tile] = [
                    _fma(number, factors[i // 2], old)
                    for i, (number, old) in enumerate(zip(found, before, strict=True))
                ]
    registers = total.registers.copy()
    for eight in range(eights):
        for tile in range(shares):
            for half in range(2):
                registers[register_place(tile, eight, half)] = pair(*sums[eight][tile][2 * half : 2 * half + 2])
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _float16(word: Any) -> list[Any]:
    """Eight numbers of four bits, two by two, in `ORDER`."""

    def spread(of_signs: Any, of_numbers: Any) -> list[Any]:
        numbers = arith.andi(of_numbers, const(_NUMBERS))
        in_bytes = arith.ori(arith.andi(of_signs, const(_SIGNS)), numbers)
        lower = _ptx(f"prmt.b32 $0, $1, $2, {_LOWER_BYTES_UP};", in_bytes, const(0))
        return [arith.andi(in_bytes, const(_UPPER)), lower]

    odd = spread(word, arith.shrui(word, const(3)))
    even = spread(*(_ptx(f"mul.lo.u32 $0, $1, {by};", word) for by in (16, 2)))  # where sums are done, not logic
    return odd + even


def _factor(scale: Any, offset: int) -> Any:
    """A scale, in float32."""
    exponent = arith.extui(i32(), llvm.load(_i8(), _byte(scale, const(offset))))
    return utils.bitcast(_ptx(f"mul.lo.u32 $0, $1, {_TO_FLOAT32};", exponent), ir.F32Type.get())


def _four_words(pointer: Any, offset: int) -> list[Any]:
    words = llvm.load(ir.VectorType.get((4,), i32()), _byte(pointer, const(offset)), alignment=16)
    return [llvm.extractelement(words, const(i)) for i in range(4)]


def _fma(a: Any, b: Any, c: Any) -> Any:
    return llvm.intr_fma(a, b, c)


def _ptx(text: str, *operands: Any) -> Any:
    return llvm.inline_asm(i32(), list(operands), text, ",".join(["=r"] + ["r"] * len(operands)))


def _byte(pointer: Any, offset: Any) -> Any:
    return utils.getelementptr(pointer, [offset], _i8())


def _zero() -> Any:
    return arith.constant(ir.F32Type.get(), 0.0)


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
