"""Rows of queries in shared memory as sums of fp8 numbers, as `fp8_queries` makes them, each row of its own size.

A half of a warp has a row: its largest number, the power of two that the row is divided by, and its parts.
"""

import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jattn_kernels.lowering.fp8_parts import EXPONENT, MANTISSA_BITS, NARROW_SIZE, SIZES, leading_bits
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS

COLUMNS = 128  # of a row: eight of a thread, and one row of swizzled memory as parts
_NUMBERS = 8  # of a thread
_ROW_THREADS = COLUMNS // _NUMBERS
_WARP, _THREADS = 32, 128
_CHUNK = 16  # bytes that lie together however memory is swizzled
_ONE = 127 << MANTISSA_BITS  # the bits of 1.0
_KINDS = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}


def split_rows(rows: Any, parts: Any, sizes: Any) -> None:
    """Splits rows; other warps know what is stored only behind `plgpu.commit_smem`.

    Args:
        rows: [R, 128], bfloat16 or float16, R a multiple of 8, without tiles.
        parts: [parts * R, 128], tiled, of fp8.
        sizes: float32 [R].
    """
    if tiles.interpret_params() is not None:
        _split_all(rows, parts, sizes)
        return
    num_rows, kind = rows.shape[0], _KINDS[jnp.dtype(parts.dtype).name]
    num_parts, is_bfloat16 = parts.shape[0] // num_rows, rows.dtype == jnp.bfloat16
    dropped = MANTISSA_BITS - jnp.finfo(parts.dtype).nmant
    least, most = (math.frexp(size)[1] - 1 << MANTISSA_BITS for size in SIZES)
    narrow = round(math.log2(NARROW_SIZE)) << MANTISSA_BITS
    tiling: Any = plgpu.TilingTransform  # typed as abstract
    swizzling: Any = plgpu.SwizzleTransform
    tiled = plgpu.RefType((tiling((TILED_ROWS, COLUMNS)), swizzling(COLUMNS)))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), tiled, plgpu.RefType()))
    def split(ctx: Any, rows: Any, parts: Any, sizes: Any) -> None:
        del ctx
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        of_rows, of_parts, of_sizes = (llvm.ptrtoint(i32, utils.memref_ptr(ref)) for ref in (rows, parts, sizes))
        thread = arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), _const(_THREADS))
        own_row, place = (op(thread, _const(_ROW_THREADS)) for op in (arith.divui, arith.remui))
        # A row of a warp's half: its number in a tile stays the same from one tile to the next.
        chunk = arith.xori(arith.divui(place, _const(2)), own_row)
        in_row = arith.addi(
            arith.muli(chunk, _const(_CHUNK)), arith.muli(arith.remui(place, _const(2)), _const(_NUMBERS))
        )
        for begin in range(0, num_rows, _THREADS // _ROW_THREADS):
            row = arith.addi(own_row, _const(begin))
            address = arith.addi(
                of_rows, arith.muli(arith.addi(arith.muli(row, _const(_ROW_THREADS)), place), _const(16))
            )
            words = utils.inline_ptx(
                "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", address, result_types=[i32] * 4, has_side_effects=True
            )
            numbers = [number for word in words for number in _two(word, is_bfloat16)]
            largest = _const(0)
            for number in numbers:
                bits = arith.andi(llvm.bitcast(i32, number), _const(0x7FFFFFFF))
                largest = arith.maxsi(largest, bits)
            distance = 1
            while distance < _ROW_THREADS:
                other = utils.inline_ptx(
                    f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;",
                    largest,
                    result_types=i32,
                    has_side_effects=True,
                    convergent=True,
                )
                largest = arith.maxsi(largest, other)
                distance *= 2
            exponent = arith.andi(largest, _const(EXPONENT))
            clipped = arith.minsi(arith.maxsi(exponent, _const(_ONE + least)), _const(_ONE + most))
            is_zero = arith.cmpi(arith.CmpIPredicate.eq, exponent, _const(0))
            size = arith.subi(arith.select(is_zero, _const(_ONE), clipped), _const(narrow))
            utils.inline_ptx(
                "st.shared.b32 [$0], $1;",
                arith.addi(of_sizes, arith.muli(row, _const(4))),
                size,
                predicate=arith.cmpi(arith.CmpIPredicate.eq, place, _const(0)),
                has_side_effects=True,
            )
            inverse = llvm.bitcast(f32, arith.subi(_const(2 * _ONE), size))
            rest = [arith.mulf(number, inverse) for number in numbers]
            for part in range(num_parts):
                leading = []
                for number in rest:
                    bits = arith.addi(llvm.bitcast(i32, number), _const(1 << (dropped - 1)))
                    leading.append(llvm.bitcast(f32, arith.andi(bits, _const(-(1 << dropped)))))
                rest = [arith.subf(number, taken) for number, taken in zip(rest, leading, strict=True)]
                narrowed = [
                    utils.inline_ptx(
                        "{ .reg .b16 low, high; "
                        f"cvt.rn.satfinite.{kind}.f32 low, $2, $1; cvt.rn.satfinite.{kind}.f32 high, $4, $3; "
                        "mov.b32 $0, {low, high}; }",
                        *leading[first : first + 4],
                        result_types=i32,
                    )
                    for first in (0, 4)
                ]
                at = (part * num_rows + begin) * COLUMNS
                target = arith.addi(
                    arith.addi(of_parts, in_row), arith.addi(arith.muli(own_row, _const(COLUMNS)), _const(at))
                )
                utils.inline_ptx("st.shared.v2.b32 [$0], {$1, $2};", target, *narrowed, has_side_effects=True)

    run: Any = split
    run(rows, parts, sizes)


def _split_all(rows: Any, parts: Any, sizes: Any) -> None:
    """The same in the interpreter."""
    rest, num_rows, dtype = rows[...].astype(jnp.float32), rows.shape[0], parts.dtype
    exponent = lax.bitcast_convert_type(jnp.max(jnp.abs(rest), axis=1), jnp.int32) & EXPONENT
    largest = jnp.where(exponent == 0, 1.0, jnp.clip(lax.bitcast_convert_type(exponent, jnp.float32), *SIZES))
    sizes[...] = largest / NARROW_SIZE
    rest /= (largest / NARROW_SIZE)[:, None]
    for begin in range(0, parts.shape[0], num_rows):
        part = leading_bits(rest, dtype)
        parts[pl.ds(begin, num_rows)] = part.astype(dtype)
        rest -= part


def _two(word: Any, is_bfloat16: bool) -> tuple[Any, Any]:
    """Both numbers of a word as float32."""
    f32 = ir.F32Type.get()
    ptx = (
        "{ .reg .b32 bits; shl.b32 bits, $2, 16; mov.b32 $0, bits; and.b32 bits, $2, 0xffff0000; mov.b32 $1, bits; }"
        if is_bfloat16
        else "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
    )
    low, high = utils.inline_ptx(ptx, word, result_types=[f32, f32])
    return low, high


def _const(value: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), value)
