"""The grouped product of few rows an expert and weights in mxfp4: all SMs read weights from the start.

grid (blocks)             an SM each; takes its share of the units: 16 columns of a tile's rows, whole
  producer warp           TMA: a unit's weights as they lie in memory, line by line, a stage; the scales of four units
  consumer warpgroups     before a tile's first unit: its rows in float16, in registers, each warp its share of the
                          depth. Then of each unit: weights made float16 in registers, a product a group, times its
                          scale
  last warpgroup          what the warps' sums make, biases, activation, the way out
  full                    producer -> consumers: a unit has arrived; `empty` back: it may be overwritten
  scales_full             the same of scales, and `scales_empty`
  drained, maxima_full    among the consumers: the last tile's rows are done with; what all know of the next one's
  summed                  consumers -> last warpgroup: their sums of a unit are in shared memory; `free` back

Where there is an activation, the 16 columns are 8 of the gate and 8 of the other half, so that their sums meet in
shared memory. The blocks' shares of the units are neighbours, so that a block has few tiles. What a copy of part of the
depth reads begins anywhere in a line of memory, and takes half as long again.
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
from jattn_kernels.mosaic.sm90.common.tiles import COPY_ALIGNMENT, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.column_products import store_products
from jattn_kernels.mosaic.sm90.experts.column_sizes import COLUMNS, SCALED_UNITS, ColumnSizes
from jattn_kernels.mosaic.sm90.experts.few_rows_result import FewRowsResult
from jattn_kernels.mosaic.sm90.experts.few_rows_units import Share, Unit
from jattn_kernels.mosaic.sm90.experts.held_rows import HeldRows, held, load_rows
from jattn_kernels.quantized import MXFP4


class FewRowsOperands(NamedTuple):
    """What the kernel reads.

    Attributes:
        x: Rows, bfloat16.
        sources: Which row of x stands in a slot; None where they stand in their slots already.
        kernel, scales: Of all experts of all layers, their outputs in as many parts as a product sums at once: two.
        bias: Of all experts' outputs, one after the other, or None.
        layer, work, num_tiles: As in ProductOperands.
    """

    x: Float[Array, "X K"]
    sources: Int[Array, " S"] | None
    kernel: UInt8[Array, "LE parts lines 128"]
    scales: UInt8[Array, "LE G parts C"]
    bias: Float[Array, " LEC"] | None
    layer: Int[Array, "1"]
    work: Int[Array, "tiles 3"]
    num_tiles: Int[Array, "1"]


class _Scratch(NamedTuple):
    kernel: Any  # (stages, parts, lines / parts, 128)
    scales: Any  # (buffers, groups and those left free, parts, 64 / parts)
    maxima: Any  # (warps, rows)
    sums: Any  # (buffers, warps, 16, rows and some left free)
    full: Any
    empty: Any
    scales_full: Any
    scales_empty: Any
    drained: Any
    maxima_full: Any
    summed: Any
    free: Any


def few_rows_product(
    operands: FewRowsOperands,
    sizes: ColumnSizes,
    *,
    num_slots: int,
    num_experts: int,
    activation: Callable[[Any, Any], Any] | None = None,
    out_dtype: Any,
) -> Float[Array, "S C_out"]:
    """Each slot's row times its expert's weights; whatever memory held, in slots that no row has.

    Args:
        activation: Of two halves of the columns, the gate's and the other's, makes the result, in float32.
    """
    leaves, tree = jax.tree.flatten(operands)
    parts = 1 if activation is None else 2
    columns = operands.scales.shape[-1]
    result = FewRowsResult(sizes=sizes, columns=columns, activation=activation, dtype=jnp.dtype(out_dtype))
    assert result.parts == parts
    product = _FewRowsProduct(sizes=sizes, num_experts=num_experts, result=result)
    run = launch.kernel(
        functools.partial(product.body, tree),
        out_type=jax.ShapeDtypeStruct((num_slots * columns,), out_dtype),
        grid=(tiles.num_sms(),),
        grid_names=("block",),
        num_threads=sizes.consumers + 2,
        kernel_name="few_rows_down" if activation is None else "few_rows_gate_up",
    )
    return run(*leaves).reshape(num_slots, columns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FewRowsProduct:
    sizes: ColumnSizes
    num_experts: int
    result: FewRowsResult

    def body(self, tree: Any, *refs: Any) -> None:
        operands, out = jax.tree.unflatten(tree, refs[:-1]), refs[-1]
        pl.run_scoped(functools.partial(self._warpgroup, operands, out), self._scratch(), collective_axes="warpgroup")

    def _scratch(self) -> _Scratch:
        sizes, parts = self.sizes, self.result.parts
        side = WGMMA_ROWS // parts
        return _Scratch(
            kernel=plgpu.SMEM((sizes.stages, parts, sizes.lines // parts, COPY_ALIGNMENT), MXFP4),
            scales=plgpu.SMEM((sizes.scale_buffers, sizes.rows_of_scales, parts, side), MXFP4),
            maxima=plgpu.SMEM((sizes.warps, sizes.rows), jnp.int32),
            sums=plgpu.SMEM((sizes.buffers, sizes.warps, COLUMNS, sizes.row_sums), jnp.float32),
            full=plgpu.Barrier(num_barriers=sizes.stages),
            empty=plgpu.Barrier(num_arrivals=sizes.consumers, num_barriers=sizes.stages),
            scales_full=plgpu.Barrier(num_barriers=sizes.scale_buffers),
            scales_empty=plgpu.Barrier(num_arrivals=sizes.consumers, num_barriers=sizes.scale_buffers),
            drained=plgpu.Barrier(num_arrivals=sizes.consumers),
            maxima_full=plgpu.Barrier(num_arrivals=sizes.consumers),
            summed=plgpu.Barrier(num_arrivals=sizes.consumers, num_barriers=sizes.buffers),
            free=plgpu.Barrier(num_barriers=sizes.buffers),
        )

    def _warpgroup(self, operands: Any, out: Any, scratch: _Scratch) -> None:
        warpgroup, sizes = lax.axis_index("warpgroup"), self.sizes
        blocks = self.result.columns // self.result.block_columns
        share = Share.of(operands.work, operands.num_tiles[0], blocks, alike=len(sizes.row_counts) == 1)

        @pl.when(warpgroup < sizes.consumers)
        def consume():
            plgpu.set_max_registers(sizes.registers.consumer, action="increase")
            self._consume(operands, share, scratch, warpgroup)

        @pl.when(warpgroup == sizes.consumers)
        def finish():
            plgpu.set_max_registers(sizes.registers.last, action="decrease")
            self._finish(operands, share, out, scratch)

        @pl.when(warpgroup == sizes.consumers + 1)
        def produce():
            plgpu.set_max_registers(sizes.registers.producer, action="decrease")
            tiles.by_warps(1, lambda *_: self._produce(operands, share, scratch))

    def _expert(self, operands: Any, unit: Unit) -> Any:
        """Its number among those of all layers."""
        return operands.layer[0] * self.num_experts + unit.expert

    def _scales(self, share: Share, number: Any) -> Any:
        """How many scales are copied before a unit's."""
        return lax.div(number, SCALED_UNITS) - lax.div(share.first, SCALED_UNITS)

    def _begins_scales(self, share: Share, number: Any) -> Any:
        return (number == share.first) | (lax.rem(number, SCALED_UNITS) == 0)

    def _produce(self, operands: Any, share: Share, scratch: _Scratch) -> None:
        sizes, parts = self.sizes, self.result.parts
        lines, side, whole = sizes.lines // parts, WGMMA_ROWS // parts, pl.ds(0, parts)

        def copy_unit(unit, number):
            done, expert = number - share.first, self._expert(operands, unit)
            stage, scales = lax.rem(done, sizes.stages), self._scales(share, number)

            @pl.when(self._begins_scales(share, number))
            def copy_scales():
                buffer = lax.rem(scales, sizes.scale_buffers)
                pl.when(scales >= sizes.scale_buffers)(lambda: plgpu.barrier_wait(scratch.scales_empty.at[buffer]))
                columns = pl.ds(lax.div(unit.block, SCALED_UNITS) * side, side)
                source = operands.scales.at[expert, pl.ds(0, sizes.groups), whole, columns]
                target = scratch.scales.at[buffer, pl.ds(0, sizes.groups)]
                plgpu.copy_gmem_to_smem(source, target, scratch.scales_full.at[buffer])

            pl.when(done >= sizes.stages)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
            source = operands.kernel.at[expert, whole, pl.ds(unit.block * lines, lines)]
            plgpu.copy_gmem_to_smem(source, scratch.kernel.at[stage], scratch.full.at[stage])

        share.for_each(copy_unit)
        wait_for_last(scratch.empty, share.end - share.first, sizes.stages)

    def _consume(self, operands: Any, share: Share, scratch: _Scratch, warpgroup: Any) -> None:
        sizes = self.sizes
        last_scales = self._scales(share, share.end - 1)

        def multiply_tile(tile, first, end):
            rows = self._hold(operands, scratch, tile)

            @pl.loop(first, end)
            def multiply_unit(number):
                done, scales = number - share.first, self._scales(share, number)
                stage, place = lax.rem(done, sizes.stages), lax.rem(done, sizes.buffers)
                buffer = lax.rem(scales, sizes.scale_buffers)
                begins = self._begins_scales(share, number)
                pl.when(begins)(lambda: plgpu.barrier_wait(scratch.scales_full.at[buffer]))
                plgpu.barrier_wait(scratch.full.at[stage])
                pl.when(done >= sizes.buffers)(lambda: plgpu.barrier_wait(scratch.free.at[place]))
                multiply = functools.partial(
                    store_products,
                    rows,
                    scratch.kernel.at[stage],
                    scratch.scales.at[buffer],
                    scratch.sums.at[place],
                    lax.rem(number, SCALED_UNITS),
                    warpgroup,
                    sizes=sizes,
                )
                least = 0
                for count in sizes.row_counts:
                    enough = (tile.rows > least) & (tile.rows <= count)
                    pl.when(enough)(functools.partial(multiply, count=count))
                    least = count
                plgpu.barrier_arrive(scratch.empty.at[stage])
                plgpu.barrier_arrive(scratch.summed.at[place])
                ends = (lax.rem(number, SCALED_UNITS) == SCALED_UNITS - 1) | (number == share.end - 1)
                needed = scales + sizes.scale_buffers <= last_scales
                pl.when(ends & needed)(lambda: plgpu.barrier_arrive(scratch.scales_empty.at[buffer]))

        share.for_each_tile(multiply_tile)

    def _hold(self, operands: Any, scratch: _Scratch, tile: Unit) -> HeldRows:
        """A tile's rows, of which each warp has its share."""
        plgpu.barrier_arrive(scratch.drained)
        plgpu.barrier_wait(scratch.drained)
        loaded = load_rows(operands.x, operands.sources, scratch.maxima, tile.first, tile.rows, self.sizes)
        plgpu.barrier_arrive(scratch.maxima_full)
        plgpu.barrier_wait(scratch.maxima_full)
        return held(loaded, scratch.maxima, self.sizes)

    def _finish(self, operands: Any, share: Share, out: Any, scratch: _Scratch) -> None:
        buffers = self.sizes.buffers

        def store(unit, number):
            place = lax.rem(number - share.first, buffers)
            plgpu.barrier_wait(scratch.summed.at[place])
            self.result.store(out, unit, self._expert(operands, unit), scratch.sums.at[place], operands.bias)
            pl.when(share.end - number > buffers)(lambda: plgpu.barrier_arrive(scratch.free.at[place]))

        share.for_each(store)
