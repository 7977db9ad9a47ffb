"""Weights that a product's kernel asks the L2 cache for once it has asked for all of its own.

Memory has nothing to do from a kernel's last copy to the next one's first, some four microseconds. Some rows of every
few are asked for, so that whatever the next kernel copies lies in the cache in part: it reads both at the same time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jattn_kernels.ahead import Ahead
from jattn_kernels.mosaic.sm90.common import tiles

MOST_BYTES = 16 * 1024 * 1024  # that memory brings between two kernels, and the cache keeps
_PERIOD = 32  # rows, of which the first ones are asked for
_THREADS = 128
_ALIGNMENT = 16  # bytes, of what is asked for at once


class AheadOperands(NamedTuple):
    """In global memory.

    Attributes:
        values: (layers, rows, depth), fp8 or int4.
        layer: Which of them, (1,).
    """

    values: Any
    layer: Any

    @classmethod
    def of(cls, ahead: Sequence[Ahead]) -> "tuple[AheadOperands, ...]":
        """Of those whose rows can be asked for one by one."""
        return tuple(cls(each.values, each.layer_index.reshape(1)) for each in ahead if _can_be(each.values))


def row_bytes(values: Any) -> int:
    """Of a row of weights in fp8 or int4."""
    return values.shape[2] // (2 if values.dtype == jnp.int4 else 1)


def _can_be(values: Any) -> bool:
    return row_bytes(values) % _ALIGNMENT == 0 and values.shape[1] % _PERIOD == 0


def rows_asked_for(ahead: Sequence[AheadOperands], most_bytes: int) -> list[int]:
    """Of each 32 rows of each, in their order, until there are so many bytes."""
    counts = []
    for each in ahead:
        of_row = each.values.shape[1] // _PERIOD * row_bytes(each.values)
        counts.append(min(_PERIOD, max(0, most_bytes) // of_row))
        most_bytes -= counts[-1] * of_row
    return counts


def ask(ahead: Sequence[AheadOperands], block: Any, num_blocks: int) -> None:
    """Asks for a block's share; called by one warpgroup.

    Args:
        block: Its number among so many.
    """
    if tiles.interpret_params() is not None:
        return
    for each, rows in zip(ahead, rows_asked_for(ahead, MOST_BYTES), strict=True):
        if rows:
            _ask(each, rows, block, num_blocks)


def _ask(ahead: AheadOperands, rows: int, block: Any, num_blocks: int) -> None:
    """Each thread asks for the first rows of every so many-th period."""
    _, num_rows, _ = ahead.values.shape
    of_row = row_bytes(ahead.values)
    periods = num_rows // _PERIOD

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT))
    def ask_threads(ctx: Any, values: Any, layer: Any, block: Any) -> None:
        del ctx
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))

        def constant(value: int, kind: Any = i32) -> Any:
            return arith.constant(kind, value)

        base = llvm.ptrtoint(i64, utils.memref_ptr(values))
        thread = arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), constant(_THREADS))
        own = arith.addi(arith.muli(thread, constant(num_blocks)), block.registers.item())
        for begin in range(0, periods, num_blocks * _THREADS):
            period = arith.addi(own, constant(begin))
            first = arith.addi(
                arith.muli(layer.registers.item(), constant(num_rows)), arith.muli(period, constant(_PERIOD))
            )
            address = arith.addi(base, arith.muli(arith.extui(i64, first), constant(of_row, i64)))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, period, constant(periods))):
                utils.inline_ptx(
                    "cp.async.bulk.prefetch.L2.global [$0], $1;",
                    address,
                    constant(rows * of_row),
                    has_side_effects=True,
                )

    run: Any = ask_threads
    run(ahead.values, ahead.layer[0], block)
