"""Rows put into shared memory in float16, in the order in which a thread multiplies them with weights of four bits.

A row is divided by a power of two that brings its largest number to 2^14 up to 2^15: bfloat16's eight bits are kept of
all that is larger than 2^-31 of that, and what is smaller is off by at most 2^-40 of it.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.row_pieces import THREADS, VECTOR, Piece, pieces
from jattn_kernels.mosaic.sm90.experts.e2m1_products import FACTOR, ORDER
from jattn_kernels.mosaic.sm90.experts.two_terms import factor_of, scaled
from jattn_kernels.mxfp4 import GROUP

_TOP = 14  # the exponent that a row's largest number gets
_BYTES = 2
_VECTORS_OF_GROUP = GROUP // VECTOR


def put_in_float16(row: Any, target: Any, number: Any) -> Any:
    """Writes a row by a warpgroup, and returns what its products are to be multiplied with.

    Args:
        row: [K] in global memory.
        target: (groups, rows, 32), in shared memory.
        number: Of the rows.
    """
    of_row = pieces(row.shape[0])
    in_pieces, exponent = scaled([piece.load(row).astype(jnp.float32) for piece in of_row], _TOP)
    for piece, numbers in zip(of_row, in_pieces, strict=True):
        _store(target, number, numbers.astype(jnp.float16), piece)
    return factor_of(exponent, _TOP) * FACTOR


def _store(target: Any, row: Any, values: jax.Array, piece: Piece) -> None:
    """A thread's eight numbers are a vector of a row of a group."""
    if tiles.interpret_params() is not None:
        groups = pl.ds(piece.begin // GROUP, piece.size // GROUP)
        target[groups, row] = values.reshape(-1, GROUP)
        return
    rows = target.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, piece.layout))
    def store(ctx: Any, target: Any, row: Any, values: Any) -> None:
        del ctx
        thread = arith.remui(_thread(), _const(THREADS))
        pointer, row_place = utils.memref_ptr(target), arith.muli(row.registers.item(), _const(GROUP * _BYTES))
        for i, register in enumerate(values.registers.flat):
            vector = arith.addi(thread, _const(piece.begin // VECTOR + i * THREADS))
            turned = llvm.shufflevector(register.type, register, register, list(ORDER))
            place = arith.addi(row_place, _place(vector, rows))
            llvm.store(turned, utils.getelementptr(pointer, [place], _i8()), alignment=VECTOR * _BYTES)

    run: Any = store
    run(target, row, values)


def _place(vector: Any, rows: int) -> Any:
    """Bytes to a vector of a row, from the row's first."""
    group, of_group = (op(vector, _const(_VECTORS_OF_GROUP)) for op in (arith.divui, arith.remui))
    return arith.addi(arith.muli(group, _const(rows * GROUP * _BYTES)), arith.muli(of_group, _const(VECTOR * _BYTES)))


def _thread() -> Any:
    return arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x))


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _i8() -> Any:
    return ir.IntegerType.get_signless(8)


def _const(value: int) -> Any:
    return arith.constant(_i32(), value)
