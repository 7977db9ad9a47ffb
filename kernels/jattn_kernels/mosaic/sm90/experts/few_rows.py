"""The grouped product of few rows an expert and weights in mxfp4: all SMs read weights from the start.

grid (blocks)             an SM each; takes its share of the units: 64 columns of a tile's rows, a share of the depth
  producer warp           TMA: weights and their scales, some groups of 32 inputs a stage, stages ahead, across units
  consumer warpgroups     before a tile's first unit: its rows in float16, in shared memory, some rows each. Then every
                          n-th stage each: weights made float16 in registers, a product a group, times its scale
  last warpgroup          what the consumers' sums make, biases, activation, the way out
  full                    producer -> a consumer: a stage has arrived; `empty` back: it may be overwritten
  drained, rows_full      among the consumers: the last tile's rows are done with; the next one's are there
  summed                  consumers -> last warpgroup: their sums of a unit are in shared memory; `free` back

Where there is an activation, the 64 columns are 32 of the gate and 32 of the other half, so that their sums meet in
shared memory. The blocks' shares of the units are neighbours, so that a block has few tiles, and as long as each other.

A unit's sums are added up in an order that its place among the block's units decides: a token's result may differ in
its last place from what it is among other tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.product_tiles import wait_for_last
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.e2m1_products import stage_added, store_sums
from jattn_kernels.mosaic.sm90.experts.few_rows_result import FewRowsResult
from jattn_kernels.mosaic.sm90.experts.few_rows_shares import share_of_units
from jattn_kernels.mosaic.sm90.experts.few_rows_sizes import FewRowsSizes
from jattn_kernels.mosaic.sm90.experts.few_rows_units import Unit, equal_share, for_each_unit
from jattn_kernels.mosaic.sm90.experts.float16_rows import put_rows_in_float16
from jattn_kernels.mxfp4 import GROUP
from jattn_kernels.quantized import MXFP4, NUMBERS_OF_BYTE


class FewRowsOperands(NamedTuple):
    """What the kernel reads.

    Attributes:
        x: Rows, bfloat16.
        sources: Which row of x stands in a slot; None where they stand in their slots already.
        kernel, scales: Of all experts of all layers, their outputs in as many parts as a product sums at once: two.
        bias: Of all experts' outputs, one after the other, or None.
        layer, work, num_tiles: As in ProductOperands.
        share: Of all units that a block has: the first, and the first one behind them; once it knows.
    """

    x: Float[Array, "X K"]
    sources: Int[Array, " S"] | None
    kernel: UInt8[Array, "LE parts C bytes"]
    scales: UInt8[Array, "LE G parts C"]
    bias: Float[Array, " LEC"] | None
    layer: Int[Array, "1"]
    work: Int[Array, "tiles 3"]
    num_tiles: Int[Array, "1"]
    share: tuple[Any, Any] | None = None


class _Scratch(NamedTuple):
    kernel: Any  # (stages, shares, parts, 64 / parts, bytes)
    scales: Any  # (stages, shares * groups and those left free, parts, 64 / parts)
    x: Any  # (K / 32, rows, 32)
    factors: Any  # (rows)
    sums: Any  # (buffers, consumers, 64 * shares, rows and some left free)
    full: Any
    empty: Any
    drained: Any
    rows_full: Any
    summed: Any
    free: Any


def few_rows_product(
    operands: FewRowsOperands,
    sizes: FewRowsSizes,
    *,
    num_slots: int,
    num_experts: int,
    activation: Callable[[Any, Any], Any] | None = None,
    out_dtype: Any,
) -> Float[Array, "splits S C_out"]:
    """Each slot's row times its expert's weights; whatever memory held, in slots that no row has.

    Args:
        activation: Of two halves of the columns, the gate's and the other's, makes the result, in float32.
    """
    leaves, tree = jax.tree.flatten(operands)
    _, _, columns, width = operands.kernel.shape
    result = FewRowsResult(
        sizes=sizes, columns=columns, num_slots=num_slots, activation=activation, dtype=jnp.dtype(out_dtype)
    )
    product = _FewRowsProduct(sizes=sizes, depth=width * NUMBERS_OF_BYTE, num_experts=num_experts, result=result)
    run = launch.kernel(
        functools.partial(product.body, tree),
        out_type=jax.ShapeDtypeStruct((sizes.splits * num_slots * columns,), out_dtype),
        grid=(tiles.num_sms(),),
        grid_names=("block",),
        num_threads=sizes.consumers + 2,
        kernel_name="few_rows_down" if activation is None else "few_rows_gate_up",
    )
    return run(*leaves).reshape(sizes.splits, num_slots, columns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FewRowsProduct:
    sizes: FewRowsSizes
    depth: int
    num_experts: int
    result: FewRowsResult

    @property
    def steps(self) -> int:
        return self.depth // (self.sizes.stage_groups * GROUP)

    def body(self, tree: Any, *refs: Any) -> None:
        operands, out = jax.tree.unflatten(tree, refs[:-1]), refs[-1]
        pl.run_scoped(functools.partial(self._warpgroup, operands, out), self._scratch(), collective_axes="warpgroup")

    def _scratch(self) -> _Scratch:
        sizes, parts, side = self.sizes, self.result.parts, self.result.block_columns
        stages: dict[str, Any] = {"num_barriers": sizes.stages}
        buffers: dict[str, Any] = {"num_barriers": sizes.buffers}
        width = sizes.groups * GROUP // NUMBERS_OF_BYTE
        return _Scratch(
            kernel=plgpu.SMEM((sizes.stages, sizes.shares, parts, side, width), MXFP4),
            scales=plgpu.SMEM((sizes.stages, sizes.rows_of_scales, parts, side), MXFP4),
            x=plgpu.SMEM((self.depth // GROUP, sizes.rows, GROUP), jnp.float16),
            factors=plgpu.SMEM((sizes.rows,), jnp.float32),
            sums=plgpu.SMEM((sizes.buffers, sizes.consumers, WGMMA_ROWS * sizes.shares, sizes.row_sums), jnp.float32),
            full=plgpu.Barrier(num_arrivals=sizes.shares + 1, **stages),
            empty=plgpu.Barrier(**stages),
            drained=plgpu.Barrier(num_arrivals=sizes.consumers),
            rows_full=plgpu.Barrier(num_arrivals=sizes.consumers),
            summed=plgpu.Barrier(num_arrivals=sizes.consumers, **buffers),
            free=plgpu.Barrier(**buffers),
        )

    def _warpgroup(self, operands: Any, out: Any, scratch: _Scratch) -> None:
        warpgroup, sizes = lax.axis_index("warpgroup"), self.sizes
        operands = operands._replace(share=self._share(operands))

        @pl.when(warpgroup < sizes.consumers)
        def consume():
            plgpu.set_max_registers(sizes.registers.consumer, action="increase")
            self._consume(operands, scratch, warpgroup)

        @pl.when(warpgroup == sizes.consumers)
        def finish():
            plgpu.set_max_registers(sizes.registers.last, action="decrease")
            self._finish(operands, out, scratch)

        @pl.when(warpgroup == sizes.consumers + 1)
        def produce():
            plgpu.set_max_registers(sizes.registers.producer, action="decrease")
            tiles.by_warps(1, lambda *_: self._produce(operands, scratch))

    @property
    def _blocks(self) -> int:
        """Of a tile's columns."""
        return self.result.columns // self.result.block_columns

    def _share(self, operands: Any) -> tuple[Any, Any]:
        """The block's of all units."""
        num_tiles, units = operands.num_tiles[0], self._blocks * self.sizes.splits
        if len(self.sizes.row_counts) == 1:
            return equal_share(num_tiles, units)
        return share_of_units(operands.work, num_tiles, units)

    def _for_each_unit(self, operands: Any, visit: Callable[..., Any], start: Any) -> Any:
        return for_each_unit(operands.work, operands.share, (self._blocks, self.sizes.splits), visit, start)

    def _steps_of(self, unit: Unit) -> tuple[Any, Any]:
        """The first of a unit's stages along the depth, and how many."""
        splits = self.sizes.splits
        if splits == 1:
            return 0, jnp.int32(self.steps)
        first, end = (lax.div((unit.split + side) * self.steps, splits) for side in range(2))
        return first, end - first

    def _expert(self, operands: Any, unit: Unit) -> Any:
        """Its number among those of all layers."""
        return operands.layer[0] * self.num_experts + unit.expert

    def _produce(self, operands: Any, scratch: _Scratch) -> None:
        stages, groups, shares = self.sizes.stages, self.sizes.stage_groups, self.sizes.shares
        width = self.sizes.groups * GROUP // NUMBERS_OF_BYTE

        def copy_unit(unit, before, following, number, left, done):
            del before, following, number, left
            first, steps = self._steps_of(unit)
            expert, side = self._expert(operands, unit), self.result.block_columns
            columns = pl.ds(unit.block * side, side)

            @pl.loop(0, steps)
            def copy_step(k):
                stage = lax.rem(done + k, stages)
                pl.when(done + k >= stages)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                full, whole = scratch.full.at[stage], pl.ds(0, self.result.parts)
                for share in range(shares):
                    inputs = pl.ds(((first + k) * shares + share) * width, width)
                    weights = operands.kernel.at[expert, whole, columns, inputs]
                    plgpu.copy_gmem_to_smem(weights, scratch.kernel.at[stage, share], full)
                scales = pl.ds((first + k) * groups, groups)
                target = scratch.scales.at[stage, pl.ds(0, groups)]
                plgpu.copy_gmem_to_smem(operands.scales.at[expert, scales, whole, columns], target, full)

            return done + steps

        done = self._for_each_unit(operands, copy_unit, jnp.int32(0))
        wait_for_last(scratch.empty, done, stages)

    def _consume(self, operands: Any, scratch: _Scratch, warpgroup: Any) -> None:
        buffers = self.sizes.buffers

        def multiply_unit(unit, before, following, number, left, done):
            del following, left
            pl.when(unit.tile != before.tile)(lambda: self._prepare(operands, scratch, unit, warpgroup))
            place, least = lax.rem(number, buffers), 0
            for count in self.sizes.row_counts:
                enough = (unit.rows > least) & (unit.rows <= count)

                @pl.when(enough)
                def multiply(count=count):
                    sums = self._sums(scratch, unit, warpgroup, count, done)
                    pl.when(number >= buffers)(lambda: plgpu.barrier_wait(scratch.free.at[place]))
                    store_sums(sums, scratch.sums.at[place, warpgroup])

                least = count
            plgpu.barrier_arrive(scratch.summed.at[place])
            return done + self._steps_of(unit)[1]

        self._for_each_unit(operands, multiply_unit, jnp.int32(0))

    def _sums(self, scratch: _Scratch, unit: Unit, warpgroup: Any, count: int, done: Any) -> jax.Array:
        """A consumer's, of a unit of at most so many rows."""
        sizes = self.sizes
        shape, layout = (WGMMA_ROWS * sizes.shares, count), plgpu.Layout.WGMMA
        first, steps = self._steps_of(unit)
        own = lax.rem(warpgroup + sizes.consumers - lax.rem(done, sizes.consumers), sizes.consumers)

        def multiply_step(i, total):
            k = own + i * sizes.consumers
            stage = lax.rem(done + k, sizes.stages)
            plgpu.barrier_wait(scratch.full.at[stage])
            x = scratch.x.at[pl.ds((first + k) * sizes.stage_groups, sizes.stage_groups)]
            weights, scales = scratch.kernel.at[stage], scratch.scales.at[stage]
            total = stage_added(total, weights, scales, x, shares=sizes.shares)
            plgpu.barrier_arrive(scratch.empty.at[stage])
            return total

        none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        total = lax.fori_loop(0, lax.div(steps - own + sizes.consumers - 1, sizes.consumers), multiply_step, none)
        of_rows = plgpu.load(scratch.factors.at[pl.ds(0, count)], layout=layout.reduce(0), optimized=False)
        return total * lax.broadcast_in_dim(of_rows, shape, [1])

    def _prepare(self, operands: Any, scratch: _Scratch, unit: Unit, warpgroup: Any) -> None:
        """A tile's rows in float16, and their factors: a consumer's share of them."""
        plgpu.barrier_arrive(scratch.drained)
        plgpu.barrier_wait(scratch.drained)
        put_rows_in_float16(
            operands.x,
            operands.sources,
            scratch.x,
            scratch.factors,
            unit.first,
            unit.rows,
            warpgroup,
            warpgroups=self.sizes.consumers,
            split=self.sizes.warps_of_row,
        )
        plgpu.barrier_arrive(scratch.rows_full)
        plgpu.barrier_wait(scratch.rows_full)

    def _finish(self, operands: Any, out: Any, scratch: _Scratch) -> None:
        buffers = self.sizes.buffers

        def visit(unit, before, following, number, left, carry):
            del before, following
            place = lax.rem(number, buffers)
            plgpu.barrier_wait(scratch.summed.at[place])
            self.result.store(out, unit, self._expert(operands, unit), scratch.sums.at[place], operands.bias)
            pl.when(left >= buffers)(lambda: plgpu.barrier_arrive(scratch.free.at[place]))
            return carry

        self._for_each_unit(operands, visit, 0)
