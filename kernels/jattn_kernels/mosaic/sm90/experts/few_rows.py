"""The grouped product of few tokens and weights in mxfp4: all SMs read weights from the start, whatever else waits.

grid (blocks)             an SM each; takes its share of the units: 64 columns of a tile's rows, a share of the depth
  producer warpgroup      TMA: weights and their scales, some groups of 32 inputs a stage, stages ahead, across units
  rows' warpgroup         before: a tile's rows in two terms of fp8, in shared memory, a tile ahead; and
                          after: what the consumers' sums make, biases, activation, the way out
  consumer warpgroups     every n-th stage each: weights made fp8 in registers, a product a group, times its scale
  full                    producer -> a consumer: a stage has arrived; `empty` back: it may be overwritten
  rows_full               rows' warpgroup -> consumers: a tile's rows are there
  summed                  consumers -> rows' warpgroup: their sums of a unit are in shared memory; `free` back

Both terms of a row are columns of one product. Where there is an activation, the 64 columns are 32 of the gate and 32
of the other half, so that their sums meet in shared memory. The blocks' shares of the units are neighbours, so that a
block has few tiles, and rows are put into terms while weights are under way.

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
from jattn_kernels.mosaic.sm90.experts.e2m1 import as_fp8, power_of_two
from jattn_kernels.mosaic.sm90.experts.few_rows_result import FewRowsResult
from jattn_kernels.mosaic.sm90.experts.few_rows_sizes import FewRowsSizes
from jattn_kernels.mosaic.sm90.experts.few_rows_units import Unit, for_each_unit
from jattn_kernels.mosaic.sm90.experts.term_tiles import put_in_terms
from jattn_kernels.mosaic.sm90.experts.two_terms import TERMS
from jattn_kernels.mxfp4 import GROUP
from jattn_kernels.quantized import FP8, MXFP4, NUMBERS_OF_BYTE

_BUFFERS = 2  # of rows in terms, and of sums


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
    kernel: UInt8[Array, "LE parts C bytes"]
    scales: UInt8[Array, "LE G parts C"]
    bias: Float[Array, " LEC"] | None
    layer: Int[Array, "1"]
    work: Int[Array, "tiles 3"]
    num_tiles: Int[Array, "1"]


class _Scratch(NamedTuple):
    kernel: Any  # (stages, parts, 64 / parts, bytes)
    scales: Any  # (stages, groups and those left free, parts, 64 / parts)
    x: Any  # (2, terms * rows, K)
    factors: Any  # (2, rows)
    sums: Any  # (2, consumers, 64, terms * rows)
    full: Any
    empty: Any
    rows_full: Any
    summed: Any
    free: Any
    wide: Any  # (consumers, 64, depth of a stage): where the interpreter keeps what became fp8; None on a GPU


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
        return self.depth // (self.sizes.groups * GROUP)

    def body(self, tree: Any, *refs: Any) -> None:
        operands, out = jax.tree.unflatten(tree, refs[:-1]), refs[-1]
        pl.run_scoped(functools.partial(self._warpgroup, operands, out), self._scratch(), collective_axes="warpgroup")

    def _scratch(self) -> _Scratch:
        sizes, parts, side = self.sizes, self.result.parts, self.result.block_columns
        term_rows, depth = TERMS * sizes.rows, sizes.groups * GROUP
        stages: dict[str, Any] = {"num_barriers": sizes.stages}
        two: dict[str, Any] = {"num_barriers": _BUFFERS}
        return _Scratch(
            kernel=plgpu.SMEM((sizes.stages, parts, side, depth // NUMBERS_OF_BYTE), MXFP4),
            scales=plgpu.SMEM((sizes.stages, sizes.rows_of_scales, parts, side), MXFP4),
            x=tiles.tile((_BUFFERS, term_rows, self.depth), FP8, copied_columns=GROUP),
            factors=plgpu.SMEM((_BUFFERS, sizes.rows), jnp.float32),
            sums=plgpu.SMEM((_BUFFERS, sizes.consumers, WGMMA_ROWS, term_rows), jnp.float32),
            full=plgpu.Barrier(num_arrivals=2, **stages),
            empty=plgpu.Barrier(**stages),
            rows_full=plgpu.Barrier(**two),
            summed=plgpu.Barrier(num_arrivals=sizes.consumers, **two),
            free=plgpu.Barrier(**two),
            wide=tiles.probabilities_tile((sizes.consumers, WGMMA_ROWS, depth), FP8),
        )

    def _warpgroup(self, operands: Any, out: Any, scratch: _Scratch) -> None:
        warpgroup, sizes = lax.axis_index("warpgroup"), self.sizes

        @pl.when(warpgroup < sizes.consumers)
        def consume():
            plgpu.set_max_registers(sizes.registers.consumer, action="increase")
            self._consume(operands, scratch, warpgroup)

        @pl.when(warpgroup == sizes.consumers)
        def around():
            plgpu.set_max_registers(sizes.registers.rows, action="increase")
            self._prepare_and_finish(operands, out, scratch)

        @pl.when(warpgroup == sizes.consumers + 1)
        def produce():
            plgpu.set_max_registers(sizes.registers.producer, action="decrease")
            self._produce(operands, scratch)

    def _for_each_unit(self, operands: Any, visit: Callable[..., Any], start: Any) -> Any:
        blocks = self.result.columns // self.result.block_columns
        return for_each_unit(operands.work, operands.num_tiles[0], (blocks, self.sizes.splits), visit, start)

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
        stages, groups = self.sizes.stages, self.sizes.groups
        width = groups * GROUP // NUMBERS_OF_BYTE

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
                inputs, scales = pl.ds((first + k) * width, width), pl.ds((first + k) * groups, groups)
                weights = operands.kernel.at[expert, whole, columns, inputs]
                plgpu.copy_gmem_to_smem(weights, scratch.kernel.at[stage], full)
                target = scratch.scales.at[stage, pl.ds(0, groups)]
                plgpu.copy_gmem_to_smem(operands.scales.at[expert, scales, whole, columns], target, full)

            return done + steps

        done = self._for_each_unit(operands, copy_unit, jnp.int32(0))
        wait_for_last(scratch.empty, done, stages)

    def _consume(self, operands: Any, scratch: _Scratch, warpgroup: Any) -> None:
        stages, consumers = self.sizes.stages, self.sizes.consumers
        shape = WGMMA_ROWS, TERMS * self.sizes.rows

        def multiply_unit(unit, before, following, number, left, carry):
            del following, left
            done, buffer = carry
            is_new = unit.tile != before.tile
            buffer = jnp.where(is_new, 1 - buffer, buffer)
            pl.when(is_new)(lambda: plgpu.barrier_wait(scratch.rows_full.at[buffer]))
            first, steps = self._steps_of(unit)
            own = lax.rem(warpgroup + consumers - lax.rem(done, consumers), consumers)

            def multiply_step(i, total):
                k = own + i * consumers
                stage = lax.rem(done + k, stages)
                plgpu.barrier_wait(scratch.full.at[stage])
                depth = self.sizes.groups * GROUP
                inputs = pl.ds(pl.multiple_of((first + k) * depth, GROUP), depth)
                total = self._added(total, scratch, stage, scratch.x.at[buffer, :, inputs], warpgroup)
                plgpu.barrier_arrive(scratch.empty.at[stage])
                return total

            none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            total = lax.fori_loop(0, lax.div(steps - own + consumers - 1, consumers), multiply_step, none)
            place = lax.rem(number, _BUFFERS)
            pl.when(number >= _BUFFERS)(lambda: plgpu.barrier_wait(scratch.free.at[place]))
            scratch.sums[place, warpgroup] = total
            plgpu.barrier_arrive(scratch.summed.at[place])
            return done + steps, buffer

        self._for_each_unit(operands, multiply_unit, (jnp.int32(0), jnp.int32(_BUFFERS - 1)))

    def _added(self, total: jax.Array, scratch: _Scratch, stage: Any, x: Any, warpgroup: Any) -> jax.Array:
        wide = None if scratch.wide is None else scratch.wide.at[warpgroup]
        return stage_added(total, scratch.kernel.at[stage], scratch.scales.at[stage], x, wide, self.sizes.groups)

    def _prepare_and_finish(self, operands: Any, out: Any, scratch: _Scratch) -> None:
        def visit(unit, before, following, number, left, buffer):
            is_first = number == 0
            pl.when(is_first)(lambda: self._prepare(operands, scratch, unit, buffer))
            buffer = jnp.where((unit.tile != before.tile) & ~is_first, 1 - buffer, buffer)
            # The other buffer's tile is done with: all sums of its units have left.
            prepares = (following.tile != unit.tile) & (left > 0)
            pl.when(prepares)(lambda: self._prepare(operands, scratch, following, 1 - buffer))
            place = lax.rem(number, _BUFFERS)
            plgpu.barrier_wait(scratch.summed.at[place])
            sums, factors = scratch.sums.at[place], scratch.factors.at[buffer]
            self.result.store(out, unit, self._expert(operands, unit), sums, factors, operands.bias)
            pl.when(left >= _BUFFERS)(lambda: plgpu.barrier_arrive(scratch.free.at[place]))
            return buffer

        self._for_each_unit(operands, visit, jnp.int32(0))

    def _prepare(self, operands: Any, scratch: _Scratch, unit: Unit, buffer: Any) -> None:
        """A tile's rows in two terms, and their factors."""
        most = operands.x.shape[0] - 1

        @pl.loop(0, unit.rows)
        def prepare_row(i):
            slot = unit.first + i
            row = slot if operands.sources is None else operands.sources[slot]
            factor = put_in_terms(operands.x.at[jnp.clip(row, 0, most)], scratch.x.at[buffer], i, self.sizes.rows)
            scratch.factors[buffer, i] = factor

        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.rows_full.at[buffer])


def stage_added(total: jax.Array, weights: Any, scales: Any, x: Any, wide: Any, groups: int) -> jax.Array:
    """The sums with a stage's products, each times its scale.

    Args:
        weights: (parts, 64 / parts, bytes), in shared memory.
        scales: (groups and those left free, parts, 64 / parts).
        x: (terms * rows, depth), tiled.
        wide: (64, depth), where the interpreter keeps weights in fp8; None on a GPU, where they are in registers.
    """

    def factor_of(group: int) -> jax.Array:
        if wide is not None:
            return scales[group].reshape(WGMMA_ROWS)
        own = scales.at[group].reshape(WGMMA_ROWS)
        return plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    factors = [power_of_two(factor_of(group)) for group in range(groups)]
    in_fp8: Any = as_fp8((weights if wide is None else weights[...]).reshape(WGMMA_ROWS, -1))
    if wide is not None:
        wide[...] = in_fp8
        plgpu.commit_smem()
        in_fp8 = wide

    def product(*sums):
        for group, acc in enumerate(sums):
            own = pl.ds(group * GROUP, GROUP)
            of_group = in_fp8[:, group * GROUP : (group + 1) * GROUP] if wide is None else in_fp8.at[:, own]
            plgpu.wgmma(acc, of_group, x.at[:, own].transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return [acc[...] for acc in sums]

    results = pl.run_scoped(product, *[tiles.accumulator(*total.shape)] * groups)
    for factor, result in zip(factors, results, strict=True):
        total += result * lax.broadcast_in_dim(factor, result.shape, [0])
    return total
