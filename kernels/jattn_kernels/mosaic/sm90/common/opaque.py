"""Numbers that compilers do not know, so that what follows from them is worked out where it stands."""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from jattn_kernels.mosaic.sm90.common import tiles

_SPLAT = plgpu.Layout.WG_SPLAT


def opaque(number: Any) -> jax.Array:
    """The same int32.

    Of a number that stays the same in a loop addresses are else computed before it, and kept in registers.
    """
    number = jnp.asarray(number, jnp.int32)
    if tiles.interpret_params() is not None:
        return number

    @plgpu.inline_mgpu(arg_types=(_SPLAT,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SPLAT))
    def move(ctx: Any, number: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        moved = llvm.inline_asm(i32, [number.registers.item()], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        registers = np.array(moved, dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=number.layout, _is_signed=number.is_signed)

    run: Any = move
    return run(number)
