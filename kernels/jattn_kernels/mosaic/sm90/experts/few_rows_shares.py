"""Each block's share of a grouped product of few tokens: as long as the others', where tiles of more rows take longer.

A block has neighbours of all units. What a unit takes depends on its tile's rows, which nobody knows beforehand: so
each warp adds up all tiles' times, a lane a tile, and finds where its block's share begins and ends. A share ends where
the next block's begins, by the same sum.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir.dialects import arith, gpu, llvm
from jaxtyping import Array, Int

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS
from jattn_kernels.mosaic.sm90.common.warp_instructions import const, i32

_FEW, _MANY = 7, 9  # what a unit of a tile of up to eight rows takes, and of one of more
_LANES = 32
_SPLAT = plgpu.Layout.WG_SPLAT


def share_of_units(work: Any, num_tiles: Any, units_of_tile: int) -> tuple[Any, Any]:
    """The first of a block's units, and the first one behind them.

    Args:
        work, num_tiles: As in ProductOperands; the number itself.
        units_of_tile: Blocks of columns times shares of the depth.
    """
    bounds = [lax.axis_index("block") + side for side in range(2)]
    if tiles.interpret_params() is not None:
        first, end = (first_unit(work[:, 2], num_tiles, units_of_tile, bound) for bound in bounds)
        return first, end

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SPLAT, _SPLAT),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SPLAT),
    )
    def find(ctx: Any, work: Any, num_tiles: Any, bound: Any) -> Any:
        del ctx
        found = _found(work, num_tiles.registers.item(), units_of_tile, bound.registers.item())
        registers = np.array(found, dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=bound.layout, _is_signed=bound.is_signed)

    run: Any = find
    first, end = (run(work, num_tiles, bound) for bound in bounds)
    return first, end


def first_unit(rows: Int[Array, " tiles"], num_tiles: Any, units_of_tile: int, bound: Any) -> jax.Array:
    """The first unit of the block with this number, or of none behind the last; as `_found` has it."""
    is_used = jnp.arange(rows.shape[0]) < num_tiles
    time = jnp.where(rows <= TILED_ROWS, _FEW, _MANY)
    of_tile = jnp.where(is_used, time * units_of_tile, 0)
    ends = jnp.cumsum(of_tile)
    place = lax.div(bound * ends[-1], tiles.num_sms())
    tile = jnp.minimum(jnp.sum(ends <= place), rows.shape[0] - 1)
    inside = place - (ends[tile] - of_tile[tile])
    unit = tile * units_of_tile + lax.div(inside + time[tile] - 1, time[tile])
    return jnp.where(place >= ends[-1], num_tiles * units_of_tile, unit).astype(jnp.int32)


def _found(work: Any, num_tiles: Any, units_of_tile: int, bound: Any) -> Any:
    most, fields = work.type.shape
    lane = arith.remui(arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x)), const(_LANES))
    pointer = utils.memref_ptr(work)
    chunks, before = [], const(0)
    for begin in range(0, most, _LANES):
        tile = arith.addi(lane, const(begin))
        place = arith.addi(arith.muli(arith.minsi(tile, const(most - 1)), const(fields)), const(2))
        rows = llvm.load(i32(), utils.getelementptr(pointer, [place], i32()))
        is_few = arith.cmpi(arith.CmpIPredicate.sle, rows, const(TILED_ROWS))
        time = arith.select(is_few, const(_FEW), const(_MANY))
        is_used = arith.cmpi(arith.CmpIPredicate.slt, tile, num_tiles)
        own = arith.select(is_used, arith.muli(time, const(units_of_tile)), const(0))
        end = own
        for distance in (1, 2, 4, 8, 16):
            other = _ptx(f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;", end)
            has_other = arith.cmpi(arith.CmpIPredicate.sge, lane, const(distance))
            end = arith.addi(end, arith.select(has_other, other, const(0)))
        chunks.append((tile, time, own, arith.addi(before, end)))
        before = arith.addi(before, _ptx(f"shfl.sync.idx.b32 $0, $1, {_LANES - 1}, 31, 0xffffffff;", end))
    bound = arith.divsi(arith.muli(bound, before), const(tiles.num_sms()))
    found = const(0)
    for tile, time, own, end in chunks:
        inside = arith.subi(bound, arith.subi(end, own))
        unit = arith.divsi(arith.addi(inside, arith.subi(time, const(1))), time)
        unit = arith.addi(arith.muli(tile, const(units_of_tile)), unit)
        is_behind = arith.cmpi(arith.CmpIPredicate.sge, inside, const(0))
        is_here = arith.andi(is_behind, arith.cmpi(arith.CmpIPredicate.slt, bound, end))
        found = arith.maxsi(found, arith.select(is_here, unit, const(0)))
    found = _ptx("redux.sync.max.s32 $0, $1, 0xffffffff;", found)
    is_end = arith.cmpi(arith.CmpIPredicate.sge, bound, before)
    return arith.select(is_end, arith.muli(num_tiles, const(units_of_tile)), found)


def _ptx(text: str, operand: Any) -> Any:
    return llvm.inline_asm(i32(), [operand], text, "=r,r", has_side_effects=True)
