"""Rows in two terms of fp8 (e4m3), whose sum has the eight bits of bfloat16: products in fp8 that round no row.

A row is divided by a power of two that brings its largest number to 128 up to 256. The first term is the nearest number
of four bits, the second what is left, which four bits hold. What is smaller than 1 / 512 of the row's largest number is
off by at most 2^-17 of that; the others are exact. A block a row, all of it in the registers of one warpgroup.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm
from jaxtyping import Array, Float, Float32, Int

from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST, THREADS, VECTOR, pieces
from jattn_kernels.mosaic.sm90.experts.e2m1 import FACTOR, in_order
from jattn_kernels.quantized import FP8

TERMS = 2
MANTISSA, BIAS, _TOP = 23, 127, 7  # of float32; the exponent that a row's largest number gets
_HALF, _KEPT = 1 << 19, -(1 << 20)  # of float32's bits: what rounds to four of them, and these with sign and exponent
_LEAST = 2.0**-6  # of e4m3's normal numbers
FIRSTS, SECONDS = 0x6420, 0x7531  # of eight bytes: those of even numbers, and of odd ones
_GROUP = 32  # inputs that are turned among themselves


def padded(columns: int) -> int:
    """Columns that rows must have in memory, for so many."""
    return max(columns, LEAST)


def two_terms(
    rows: Float[Array, "X P"], sources: Int[Array, " S"] | None, *, columns: int, num_rows: int, turned: bool
) -> tuple[Float[Array, "2 R P"], Float32[Array, " R"]]:
    """Both terms of each slot's row, and the rows' factors; whatever memory held, in rows behind the last slot.

    Args:
        rows: bfloat16, `padded`.
        sources: Which row stands in a slot; None where row i stands in slot i.
        columns: Of them how many count; the others become 0.
        num_rows: Of the result.
        turned: Whether inputs are in the order of weights of 4 bits (`in_order`), and factors have that of these.
    """
    width = rows.shape[1]
    of_row = pieces(width)

    def kernel(x_ref, *refs):
        *source_ref, terms_ref, scales_ref = refs
        slot = lax.axis_index("slot")
        # In slots that no row has is whatever memory held.
        row = jnp.clip(source_ref[0][slot], 0, rows.shape[0] - 1) if source_ref else slot
        numbers = [piece.load(x_ref.at[row]).astype(jnp.float32) for piece in of_row]
        if columns != width:
            (piece,) = of_row  # of a row that was padded
            own = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=piece.layout) < columns
            numbers = [jnp.where(own, numbers[0], 0.0)]
        in_pieces, exponent = in_terms(numbers)
        for piece, terms in zip(of_row, in_pieces, strict=True):
            for term, values in enumerate(terms):
                target = piece.of(terms_ref.at[term, slot])
                if turned:
                    _store_turned(target, values.astype(FP8), piece.layout)
                else:
                    target[...] = values.astype(FP8)
        scales_ref[slot] = factor_of(exponent) * (FACTOR if turned else 1.0)

    run = launch.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((TERMS, num_rows, width), FP8),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ),
        grid=(rows.shape[0] if sources is None else sources.shape[0],),
        grid_names=("slot",),
        kernel_name="two_terms",
    )
    return run(rows) if sources is None else run(rows, sources)


def in_terms(row: list[jax.Array]) -> tuple[list[tuple[jax.Array, jax.Array]], jax.Array]:
    """Both terms of each piece of a row, as float32 that e4m3 holds, and the exponent that the row is divided by."""
    in_pieces, exponent = scaled(row, _TOP)
    terms = []
    for numbers in in_pieces:
        first = _float((_bits(numbers) + _HALF) & _KEPT)
        first = jnp.where(jnp.abs(numbers) < _LEAST, 0.0, first)
        terms.append((first, numbers - first))
    return terms, exponent


def scaled(row: list[jax.Array], top: int) -> tuple[list[jax.Array], jax.Array]:
    """A row, in pieces, divided by a power of two, and the exponent of its largest number, which becomes `top`."""
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(numbers)) for numbers in row])
    in_pieces, exponents = [], []
    for numbers in row:
        exponent = lax.broadcast_in_dim(largest, numbers.shape, [])  # Mosaic has no bits of a scalar
        exponent = jnp.maximum(_bits(exponent) >> MANTISSA, top + 1)
        in_pieces.append(numbers * _float((2 * BIAS + top - exponent) << MANTISSA))
        exponents.append(exponent)
    return in_pieces, exponents[0]


def factor_of(exponent: jax.Array, top: int = _TOP) -> Any:
    """What products of a row that was divided so are to be multiplied with."""
    return jnp.max(_float((exponent - top) << MANTISSA))


def _store_turned(target: Any, values: jax.Array, layout: Any) -> None:
    """target[...] = in_order(values): a thread's eight numbers are two words of it."""
    if tiles.interpret_params() is not None:
        target[...] = in_order(values[None])[0]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(ctx: Any, target: Any, values: Any) -> None:
        del ctx
        i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        two_words = ir.VectorType.get((2,), i32)

        def const(value: int) -> Any:
            return arith.constant(i32, value)

        thread = arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), const(THREADS))
        of_group = _GROUP // VECTOR
        group, number = arith.divui(thread, const(of_group)), arith.remui(thread, const(of_group))
        place = arith.addi(arith.muli(group, const(_GROUP)), arith.muli(number, const(VECTOR // 2)))
        pointer = utils.memref_ptr(target)
        for i, register in enumerate(values.registers.flat):
            words = utils.bitcast(register, two_words)
            low, high = (llvm.extractelement(words, const(word)) for word in range(2))
            for half, chosen in enumerate((FIRSTS, SECONDS)):
                word = llvm.inline_asm(i32, [low, high], f"prmt.b32 $0, $1, $2, {chosen};", "=r,r,r")
                offset = arith.addi(place, const(i * THREADS * VECTOR + half * _GROUP // 2))
                llvm.store(word, utils.getelementptr(pointer, [offset], i8))

    run: Any = store
    run(target, values)


def _bits(numbers: Any) -> Any:
    return lax.bitcast_convert_type(numbers, jnp.int32)


def _float(bits: Any) -> Any:
    return lax.bitcast_convert_type(bits, jnp.float32)
