"""Stores of a warpgroup's registers into a tile as wgmma reads it, each at a place that its thread tells."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS

COLUMNS = 64  # that lie together in a tile, of 16 bits
_THREADS = 128


def store_registers(target: Any, values: jax.Array, layout: Any, places: Callable[..., Any], *scalars: Any) -> None:
    """The numbers of each register into a tile, side by side.

    Args:
        target: (rows, columns), of 16 bits, tiled as `tiles.tile` does that with copies of 64 columns.
        values: Of this layout.
        places: Of the thread's number and of scalars, what tells where in the tile's memory its i-th register goes,
            swizzle included; numbers are int32 in MLIR.
    """

    @plgpu.inline_mgpu(arg_types=(tiled(), layout, *[plgpu.Layout.WG_SPLAT] * len(scalars)))
    def store(ctx: Any, target: Any, values: Any, *scalars: Any) -> None:
        del ctx
        number = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
        place = places(arith.remui(number, constant(_THREADS)), *(scalar.registers.item() for scalar in scalars))
        pointer, kind = utils.memref_ptr(target), ir.MemRefType(target.type).element_type
        for i, register in enumerate(values.registers.flat):
            llvm.store(register, utils.getelementptr(pointer, [place(i)], kind))

    run: Any = store
    run(target, values, *scalars)


def tiled() -> plgpu.RefType:
    """The type of a tile of 16 bits as `tiles.tile` makes it with copies of 64 columns."""
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.RefType((tiling((TILED_ROWS, COLUMNS)), swizzling(2 * COLUMNS)))


def constant(value: int) -> Any:
    """An int32 in MLIR."""
    return arith.constant(ir.IntegerType.get_signless(32), value)


def divided(number: Any, by: int) -> list[Any]:
    """The quotient and the remainder of a number in MLIR that is not below 0."""
    return [op(number, constant(by)) for op in (arith.divui, arith.remui)]
