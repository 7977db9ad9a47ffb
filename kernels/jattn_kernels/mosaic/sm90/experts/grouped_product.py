"""The grouped product on Hopper: rows of each expert times that expert's weights, in one persistent kernel.

grid (blocks)             an SM each; takes every blocks-th work tile: rows of one expert, a block of columns
  producer warpgroup      TMA: weights, 64 inputs at a time; `cp.async`: the rows from wherever they are; stages ahead
  consumer warpgroups     64 columns twice each: acc^T += w^T x^T over all inputs, then the epilogue, and the rows out
  full                    producer -> consumers: a stage's weights and rows have arrived
  empty                   consumers -> producer: the stage may be overwritten

Columns of the weights stand on wgmma's 64 rows and rows of x on its columns, of which a product has any multiple of 8:
so an expert that a few rows go to costs no tensor work on padding, and one kernel serves decode and prompts. Each warp-
group sums two blocks of columns, the gate's and the up projection's of the same hidden units: the activation is in the
epilogue, where both are in the same registers. The two blocks lie side by side if there is no gate.

Rows that no expert owns are never stored where another expert's are: each expert's begin at a multiple of 8, and whole
groups of 8 are stored.
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
from jaxtyping import Array, Float

from jattn_kernels.lowering.expert_groups import ProductOperands
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.gather import ROW_BYTES, gather_rows, gathered
from jattn_kernels.mosaic.sm90.experts.tile_sizes import ProductTiles

# By consumer warpgroups: of a thread of the producer, and of theirs. One has what the launch gives.
_REGISTERS = {2: (40, 232), 3: (40, 152), 4: (32, 112)}
PAIR = 2  # blocks of columns that a consumer warpgroup sums


class _Scratch(NamedTuple):
    kernel: Any  # (stages, 2, 64, 64 a consumer)
    x: Any  # (stages, block_rows, 64)
    out: Any  # (consumers, block_rows, 64)
    full: Any
    empty: Any


class WorkTile(NamedTuple):
    """Some rows of an expert, and a block of columns."""

    expert: Any
    first: Any
    rows: Any
    block: Any


def grouped_product(
    operands: ProductOperands,
    sizes: ProductTiles,
    *,
    num_slots: int,
    activation: Callable[[Any, Any], Any] | None = None,
    columns: slice | None = None,
) -> Float[Array, "S C_out"]:
    """Each slot's row times its expert's weights; whatever memory held, in slots that no row has.

    Args:
        activation: Of two halves of the columns, the gate's and the other's, makes the result, in float32.
        columns: Which ones to compute, without an activation; None is all.
    """
    wide = operands.kernel.shape[3]
    columns = columns or slice(0, wide if activation is None else wide // 2)
    leaves, tree = jax.tree.flatten(operands)
    product = GroupedProduct(
        sizes=sizes,
        depth=operands.kernel.shape[2],
        first_column=columns.start,
        columns=columns.stop - columns.start,
        activation=activation,
        dtype=operands.x.dtype,
    )
    run = launch.kernel(
        functools.partial(product.body, tree),
        out_type=jax.ShapeDtypeStruct((num_slots, product.columns), operands.x.dtype),
        grid=(tiles.num_sms(),),
        grid_names=("block",),
        num_threads=sizes.consumers + 1,
        kernel_name="grouped_product",
    )
    return run(*leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedProduct:
    """What a kernel of such a product does; another that holds its weights otherwise is a subclass."""

    sizes: ProductTiles
    depth: int
    first_column: int
    columns: int
    activation: Callable[[Any, Any], Any] | None
    dtype: Any

    @property
    def block_depth(self) -> int:
        """Inputs a stage."""
        return ROW_BYTES // jnp.dtype(self.dtype).itemsize

    @property
    def steps(self) -> int:
        return pl.cdiv(self.depth, self.block_depth)

    @property
    def side(self) -> int:
        """Columns of the consumers, of one of their two blocks."""
        return self.sizes.consumers * WGMMA_ROWS

    @property
    def block_columns(self) -> int:
        """Columns of the result that a work tile computes."""
        return self.side * (PAIR if self.activation is None else 1)

    def body(self, tree, *refs):
        operands, out = jax.tree.unflatten(tree, refs[:-1]), refs[-1]
        pl.run_scoped(functools.partial(self._warpgroup, operands, out), self.scratch(), collective_axes="warpgroup")

    def scratch(self) -> Any:
        sizes, width = self.sizes, self.block_depth
        return _Scratch(
            kernel=tiles.tile((sizes.stages, PAIR, width, self.side), self.dtype, copied_columns=WGMMA_ROWS),
            x=tiles.tile((sizes.stages, sizes.block_rows, width), self.dtype),
            out=tiles.tile((sizes.consumers, sizes.block_rows, WGMMA_ROWS), self.dtype),
            full=plgpu.Barrier(num_arrivals=PAIR + 1, num_barriers=sizes.stages),
            empty=plgpu.Barrier(num_arrivals=sizes.consumers, num_barriers=sizes.stages),
        )

    def _warpgroup(self, operands: Any, out: Any, scratch: Any):
        warpgroup, consumers = lax.axis_index("warpgroup"), self.sizes.consumers

        @pl.when(warpgroup == consumers)
        def produce():
            if consumers > 1:
                plgpu.set_max_registers(_REGISTERS[consumers][0], action="decrease")
            self.produce(operands, scratch)

        @pl.when(warpgroup < consumers)
        def consume():
            if consumers > 1:
                plgpu.set_max_registers(_REGISTERS[consumers][1], action="increase")
            self.consume(operands, out, scratch, warpgroup)

    def for_each_tile(self, operands: Any, visit: Callable[[WorkTile, Any], Any]) -> Any:
        """Calls `visit(work tile, steps before it) -> steps after it` for each of the block's; the steps in all.

        The blocks of columns of the same rows are neighbours' tiles. A tile is read from memory one ahead.
        """
        blocks = pl.cdiv(self.columns, self.block_columns)
        stride = tiles.num_sms()
        total = operands.num_tiles[0] * blocks

        def read(number):
            rows_of = jnp.minimum(lax.div(number, blocks), operands.work.shape[0] - 1)
            expert, slot, rows = (operands.work[rows_of, field] for field in range(3))
            return WorkTile(expert, slot, rows, lax.rem(number, blocks))

        def step(i, carry):
            tile, done = carry
            following = read(first + (i + 1) * stride)
            return following, visit(tile, done)

        first = lax.axis_index("block")
        tiles_here = lax.div(total - first + stride - 1, stride)
        return lax.fori_loop(0, tiles_here, step, (read(first), jnp.int32(0)))[1]

    def produce(self, operands: Any, scratch: Any) -> None:
        stages, lag = self.sizes.stages, self.sizes.lag
        layer = operands.layer[0]

        def copy_tile(tile: WorkTile, done):
            def copy_step(k, step):
                stage = lax.rem(step, stages)
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                inputs = pl.ds(k * self.block_depth, self.block_depth)
                for part in range(PAIR):
                    columns = pl.ds(self.weight_column(tile, part), self.side)
                    weights: Any = operands.kernel
                    weights = weights.at[layer, tile.expert, inputs, columns]
                    plgpu.copy_gmem_to_smem(weights, scratch.kernel.at[stage, part], scratch.full.at[stage])
                gather_rows(
                    operands.x, operands.sources, scratch.x.at[stage], tile.first, tile.rows, k * self.block_depth
                )

                @pl.when(step >= lag)
                def tell():
                    gathered(lag)
                    plgpu.barrier_arrive(scratch.full.at[lax.rem(step - lag, stages)])

                return step + 1

            return lax.fori_loop(0, self.steps, copy_step, done)

        steps = self.for_each_tile(operands, copy_tile)
        gathered(0)

        @pl.loop(jnp.maximum(steps - lag, 0), steps)
        def tell_of_the_last(step):
            plgpu.barrier_arrive(scratch.full.at[lax.rem(step, stages)])

        @pl.loop(jnp.maximum(steps, stages), steps + stages)
        def wait_for_the_last(step):
            plgpu.barrier_wait(scratch.empty.at[lax.rem(step, stages)])

    def weight_column(self, tile: WorkTile, part: int) -> Any:
        """Where one block of a tile's pair begins in the weights."""
        if self.activation is not None:
            return part * self.columns + tile.block * self.side
        return self.first_column + tile.block * self.block_columns + part * self.side

    def consume(self, operands: Any, out: Any, scratch: Any, warpgroup: Any) -> None:
        def multiply_tile(tile: WorkTile, done):
            least = 0
            for count in self.sizes.row_counts:
                enough = (tile.rows > least) & (tile.rows <= count)
                pl.when(enough)(functools.partial(self.multiply, operands, out, scratch, warpgroup, tile, count, done))
                least = count
            return done + self.steps

        self.for_each_tile(operands, multiply_tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def multiply(
        self,
        operands: Any,
        out: Any,
        scratch: Any,
        warpgroup: Any,
        tile: WorkTile,
        count: int,
        done: Any,
    ) -> None:
        """A work tile of at most so many rows."""
        stages = self.sizes.stages
        own = pl.ds(pl.multiple_of(warpgroup * WGMMA_ROWS, WGMMA_ROWS), WGMMA_ROWS)

        def product(*sums):
            def multiply_step(k, _):
                stage = lax.rem(done + k, stages)
                plgpu.barrier_wait(scratch.full.at[stage])
                x = scratch.x.at[stage, pl.ds(0, count)].transpose((1, 0))
                for part, acc in enumerate(sums):
                    plgpu.wgmma(acc, scratch.kernel.at[stage, part, :, own].transpose((1, 0)), x)
                plgpu.wgmma_wait(PAIR)  # those of the last step are done

                @pl.when(k > 0)
                def free():
                    plgpu.barrier_arrive(scratch.empty.at[lax.rem(done + k - 1, stages)])

                return ()

            lax.fori_loop(0, self.steps, multiply_step, ())
            return [acc[...] for acc in sums]

        results = pl.run_scoped(product, *(tiles.accumulator(WGMMA_ROWS, count) for _ in range(PAIR)))
        plgpu.barrier_arrive(scratch.empty.at[lax.rem(done + self.steps - 1, stages)])
        self.finish(operands, out, scratch.out.at[warpgroup], warpgroup, tile, count, results)

    def finish(
        self, operands: Any, out: Any, staging: Any, warpgroup: Any, tile: WorkTile, count: int, results: list[Any]
    ) -> None:
        """Biases, activation and the way out of a warpgroup's sums of its two blocks of columns."""
        if operands.bias is not None:
            results = [
                result + self.of_columns(operands.bias, operands.layer[0], tile, part, warpgroup, count)
                for part, result in enumerate(results)
            ]
        if self.activation is not None:
            results = [self.activation(*results)]
        for part, result in enumerate(results):
            self._store(result, out, staging, tile, part * self.side + warpgroup * WGMMA_ROWS)

    def of_columns(self, numbers: Any, layer: Any, tile: WorkTile, part: int, warpgroup: Any, count: int) -> Any:
        """Of a warpgroup's columns, for every row. The columns past the last are not stored: theirs is any."""
        column = self.weight_column(tile, part) + warpgroup * WGMMA_ROWS
        column = pl.ds(jnp.minimum(column, numbers.shape[2] - WGMMA_ROWS), WGMMA_ROWS)
        own = plgpu.load(numbers.at[layer, tile.expert, column], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return lax.broadcast_in_dim(own.astype(jnp.float32), (WGMMA_ROWS, count), [0])

    def _store(self, result: Any, out: Any, staging: Any, tile: WorkTile, column: Any) -> None:
        """Some columns of a tile's rows, in groups of 8 rows."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was staged before
        staging.at[pl.ds(0, result.shape[1])].transpose((1, 0))[...] = result.astype(self.dtype)
        plgpu.commit_smem()

        @pl.loop(0, lax.div(tile.rows + TILED_ROWS - 1, TILED_ROWS))
        def store_group(group):
            begin = pl.multiple_of(group * TILED_ROWS, TILED_ROWS)
            rows = pl.ds(pl.multiple_of(tile.first + begin, TILED_ROWS), TILED_ROWS)
            columns = pl.ds(tile.block * self.block_columns + column, WGMMA_ROWS)
            plgpu.copy_smem_to_gmem(staging.at[pl.ds(begin, TILED_ROWS)], out.at[rows, columns])
