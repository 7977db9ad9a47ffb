"""One row that a product's consumers add up and norm together, each its share of the columns, in registers."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from jattn_kernels.call import NormCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.one_row import rounded_sum
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST, THREADS, VECTOR
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS
from jattn_kernels.operands import NormOperands

FEWEST_ROWS = 17  # of which several warpgroups share each: fewer were not timed
_LANES, _WORD = 32, 4


class RowOperands(NamedTuple):
    """What the row is made of, in global memory.

    Attributes:
        scale: (layers, columns).
        layer: Which of them, (1,).
        additions: Parts of splits, (splits, rows, columns) each.
    """

    scale: Any
    layer: Any
    additions: tuple[Any, ...]

    @classmethod
    def of(cls, norm: NormOperands) -> "RowOperands":
        """Those of a norm."""
        return cls(norm.scale, norm.layer_index.reshape(1), tuple(addition.parts for addition in norm.additions))


class Meeting(NamedTuple):
    """Where the consumers that share a row, the first ones, tell each other what they found: twice at most.

    Attributes:
        numbers: (2, their warps), float32, in shared memory.
        there: Two barriers, at which each of them arrives.
        row_full: Another, for when all of the row is there.
    """

    numbers: Any
    there: Any
    row_full: Any

    @property
    def sharers(self) -> int:
        """How many they are."""
        return self.numbers.shape[1] // tiles.WARPS

    def hold(self, number: Any, make: Callable[[], None]) -> None:
        """Calls `make` in consumers that have a share; all wait until the row is there."""

        @pl.when(number < self.sharers)
        def share():
            make()
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.row_full)

        plgpu.barrier_wait(self.row_full)


def fits(num_rows: int, columns: int, most: int) -> bool:
    """Whether a product's consumers may hold such rows, of at most so many numbers."""
    return num_rows == 1 and columns % LEAST == 0 and 0 < columns <= most


def adds_up(norm: NormCall, most: int) -> bool:
    """Whether they add them up and norm them."""
    return fits(norm.num_rows, norm.columns, most) and norm.scale_dtype == norm.dtype


def sharers_of(rows: int, columns: int, most: int) -> int:
    """Warpgroups that share a row where each has a block: as many as SMs have room for without idling, up to `most`."""
    if rows < FEWEST_ROWS or columns % LEAST:
        return 1
    wanted = max(1, most // pl.cdiv(rows, tiles.num_sms()))
    return next(number for number in range(wanted, 0, -1) if columns % (LEAST * number) == 0)


def meeting(columns: int, consumers: int) -> Meeting:
    """Scratch for a meeting of those of so many consumers that have a share of the row."""
    sharers = next(number for number in range(consumers, 0, -1) if columns % (LEAST * number) == 0)
    return Meeting(
        numbers=plgpu.SMEM((2, sharers * tiles.WARPS), jnp.float32),
        there=plgpu.Barrier(num_arrivals=sharers, num_barriers=2),
        row_full=plgpu.Barrier(num_arrivals=sharers),
    )


def share_of_row(
    x: Any, operands: RowOperands | None, outs: tuple[Any, ...], norm: NormCall | None, place: Meeting, number: Any
) -> tuple[jax.Array, Any]:
    """A consumer's share of x's row, or of the norm of it and what is added, in x's dtype; and where it begins.

    Args:
        x: (1, columns), in global memory; the same of `outs`.
        outs: Where the first block stores the sum, and its norm.
        place: Its first half is used for a norm.
        number: Of the consumer.
    """
    dtype, columns = x.dtype, x.shape[1]
    size = columns // place.sharers
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=VECTOR)
    begin = pl.multiple_of(number * size, size)
    own = pl.ds(begin, size)

    if norm is None:
        return plgpu.load(x.at[0] if size == columns else x.at[0, own], layout=layout, optimized=False), begin
    assert operands is not None
    total, normed = normed_share(x, operands, 0, norm, place, number)

    @pl.when(lax.axis_index("block") == 0)
    def keep():
        for out, numbers in zip(outs, (total.astype(dtype), normed), strict=True):
            target = out.at[0]
            (target if size == columns else target.at[own])[...] = numbers

    return normed, begin


def normed_share(
    x: Any, operands: RowOperands, row: Any, norm: NormCall, place: Meeting, number: Any
) -> tuple[jax.Array, jax.Array]:
    """A warpgroup's share of a row with what is added to it, in float32, and of the norm of that, in x's dtype.

    Args:
        x: (rows, columns), in global memory.
        place: Its first half is used.
        number: Of the warpgroup.
    """
    dtype, columns = x.dtype, x.shape[1]
    size = columns // place.sharers
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=VECTOR)
    own = pl.ds(pl.multiple_of(number * size, size), size)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref if size == columns else ref.at[own], layout=layout, optimized=False)

    numbers, factor = load(x.at[row]), load(operands.scale.at[operands.layer[0]])
    sums = [
        functools.reduce(operator.add, [load(parts.at[i, row]).astype(jnp.float32) for i in range(parts.shape[0])])
        for parts in operands.additions
    ]
    total = functools.reduce(functools.partial(rounded_sum, dtype=dtype), sums, numbers.astype(jnp.float32))
    inverse = lax.rsqrt(of_all(total * total, operator.add, place, 0, number) / columns + norm.eps)
    return total, (total * inverse * (factor.astype(jnp.float32) + norm.offset)).astype(dtype)


def of_all(numbers: jax.Array, add: Callable[[Any, Any], Any], place: Meeting, half: int, number: Any) -> jax.Array:
    """All consumers' numbers, none below 0, brought together by a sum or a maximum.

    Args:
        numbers: float32, of the layout of a share.
        half: Of the meeting's place, used once.
    """
    found = place.numbers.at[half]
    store_of_warps(found, numbers, add, number)
    plgpu.barrier_arrive(place.there.at[half])
    plgpu.barrier_wait(place.there.at[half])
    return functools.reduce(add if add is operator.add else jnp.maximum, [found[i] for i in range(found.shape[0])])


def store_of_warps(target: Any, values: jax.Array, add: Callable[[Any, Any], Any], number: Any) -> None:
    """Each warp's values brought together, at the warp's number; warps of consumers are a block's first.

    Args:
        target: In shared memory, as many numbers as consumers have warps.
        values: None below 0, of a share.
        number: Of the consumer.
    """
    if tiles.interpret_params() is not None:
        reduced = values.sum() if add is operator.add else values.max()
        for warp in range(tiles.WARPS):
            target[number * tiles.WARPS + warp] = reduced if warp == 0 else jnp.float32(0)
        return
    layout = plgpu.Layout.WG_STRIDED(values.shape, vec_size=VECTOR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(ctx: Any, target: Any, values: Any) -> None:
        del ctx
        both = arith.addf if add is operator.add else arith.maximumf
        numbers = [llvm.extractelement(each, constant(i)) for each in values.registers.flat for i in range(VECTOR)]
        total = functools.reduce(both, numbers)
        for distance in (16, 8, 4, 2, 1):
            total = both(total, utils.shfl_bfly(total, distance))
        warp, lane = (op(_thread(), constant(_LANES)) for op in (arith.divui, arith.remui))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, constant(0))):
            llvm.store(total, utils.getelementptr(utils.memref_ptr(target), [warp], ir.F32Type.get()))

    run: Any = store
    run(target, values)


def store_share(target: Any, begin: Any, values: jax.Array, width: int) -> None:
    """Stores a share as a tile's first row, no number of which is moved by swizzling.

    Args:
        target: (8, columns), tiled, in shared memory.
        begin: The share's first column.
        width: Columns that lie together in the tile.
    """
    if tiles.interpret_params() is not None:
        target[0, pl.ds(begin, values.shape[0])] = values
        return
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    itemsize = jnp.dtype(target.dtype).itemsize
    tiled = plgpu.RefType((tiling((TILED_ROWS, width)), swizzling(width * itemsize)))

    @plgpu.inline_mgpu(arg_types=(tiled, plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_STRIDED(values.shape, vec_size=VECTOR)))
    def store(ctx: Any, target: Any, begin: Any, values: Any) -> None:
        del ctx
        pointer, kind = utils.memref_ptr(target), ir.IntegerType.get_signless(8 * itemsize)
        words = ir.VectorType.get((VECTOR * itemsize // 4,), ir.IntegerType.get_signless(32))
        thread = arith.remui(_thread(), constant(THREADS))
        first = arith.addi(begin.registers.item(), arith.muli(thread, constant(VECTOR)))
        for i, register in enumerate(values.registers.flat):
            tile, rest = (
                op(arith.addi(first, constant(i * LEAST)), constant(width)) for op in (arith.divui, arith.remui)
            )
            place = arith.addi(arith.muli(tile, constant(TILED_ROWS * width)), rest)
            llvm.store(utils.bitcast(register, words), utils.getelementptr(pointer, [place], kind))

    run: Any = store
    run(target, begin, values)


def constant(value: int) -> Any:
    """Of 32 bits, MLIR's."""
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _thread() -> Any:
    return arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
