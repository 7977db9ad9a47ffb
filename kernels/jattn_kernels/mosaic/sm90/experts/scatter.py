"""Stores to places that are data: what Pallas has no such store for on a GPU of Hopper, so it is written out here."""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jattn_kernels.mosaic.sm90.common import tiles


def scatter(target: Any, places: jax.Array, values: jax.Array, layout: Any) -> None:
    """target[places[i]] = values[i] for each i whose place is not below 0; of equal places one remains.

    Args:
        target: [N] int32, in global memory.
        places, values: int32, both of this layout.
    """
    if tiles.interpret_params() is not None:

        @pl.loop(0, places.shape[0])
        def store(i):
            @pl.when(places[i] >= 0)
            def _():
                target[places[i]] = values[i]

        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def store_registers(ctx, target, places, values):
        del ctx
        i32, zero = ir.IntegerType.get_signless(32), arith.constant(ir.IntegerType.get_signless(32), 0)
        pointer = utils.memref_ptr(target)
        for place, value in zip(places.registers.flat, values.registers.flat, strict=True):
            place, value = _scalar(place), _scalar(value)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.sge, place, zero)):
                llvm.store(value, utils.getelementptr(pointer, [place], i32))

    store_registers(target, places, values)


def _scalar(register: Any) -> Any:
    """The number of a register that holds one, as itself or as a vector of one."""
    if not isinstance(register.type, ir.VectorType):
        return register
    return llvm.extractelement(register, arith.constant(ir.IntegerType.get_signless(32), 0))
