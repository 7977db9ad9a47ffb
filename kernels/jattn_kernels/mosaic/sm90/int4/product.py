"""A product with weights of 4 bits, which are made wider in registers on their way to Hopper's tensor cores.

grid (blocks)            an SM each; takes every blocks-th work tile: some columns of the result, a share of the depth
  producer warpgroup     TMA: weights, their scales and rows of x, stages ahead, across work tiles
  consumer warpgroups    acc^T += w x^T: 64 columns of the result each, from registers; the rows of x on its columns
  full                   producer -> consumers: a stage has arrived
  empty                  consumers -> producer: the stage may be overwritten

The numbers of a group are multiplied as they are, exactly, and their sum with the group's scale. The depth is split so
that all SMs have as much to read (split-K): each split's sums stand by themselves, in float32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.product_tiles import ProductTile, wait_for_last
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.common.turned import store_turned
from jattn_kernels.mosaic.sm90.int4.tile_sizes import BLOCK_DEPTH, Int4Tiles
from jattn_kernels.mosaic.sm90.int4.unpacked import unpacked

_REGISTERS = {2: (40, 232), 4: (32, 112)}  # by consumer warpgroups: of a thread of the producer, and of theirs


class _Scratch(NamedTuple):
    kernel: Any  # (stages, columns, 128)
    scales: Any  # (stages, groups, columns)
    x: Any  # (stages, block_rows, 128)
    full: Any
    empty: Any
    wide: Any  # (consumers, columns, 128): where the interpreter keeps weights that were made wider; None on a GPU


def int4_matmul(
    x: Float[Array, "T D"],
    kernel: Any,
    scales: Float[Array, "L G F"],
    layer_index: Int32[Array, ""],
    sizes: Int4Tiles,
    *,
    num_rows: int,
) -> Float32[Array, "S R F"]:
    """x @ kernel^T in splits, which add up to it.

    Args:
        x: With its columns `in_order`.
        kernel: int4 [L, F, D].
        scales: Of a group of inputs of each output.
        sizes: Of the work tiles.
        num_rows: Of the result; those past x's are 0.
    """
    depth, columns = x.shape[1], kernel.shape[1]
    product = _Product(sizes=sizes, rows=num_rows, depth=depth, columns=columns, groups=scales.shape[1])
    run = launch.kernel(
        product.body,
        out_type=jax.ShapeDtypeStruct((sizes.splits, num_rows, columns), jnp.float32),
        grid=(product.num_blocks,),
        grid_names=("block",),
        num_threads=sizes.consumers + 1,
        reduction_bytes=0,
        kernel_name="int4_matmul",
    )
    return run(x, kernel, scales, layer_index.reshape(1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    sizes: Int4Tiles
    rows: int
    depth: int
    columns: int
    groups: int

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.rows, self.sizes.block_rows)

    @property
    def column_blocks(self) -> int:
        return pl.cdiv(self.columns, self.sizes.block_columns)

    @property
    def num_tiles(self) -> int:
        return self.row_blocks * self.column_blocks * self.sizes.splits

    @property
    def num_blocks(self) -> int:
        return min(self.num_tiles, tiles.num_sms())

    @property
    def group_size(self) -> int:
        return self.depth // self.groups

    @property
    def groups_of_step(self) -> int:
        return max(1, BLOCK_DEPTH // self.group_size)

    def body(self, x: Any, kernel: Any, scales: Any, layer: Any, sums: Any) -> None:
        sizes = self.sizes
        stages: dict[str, Any] = {"num_barriers": sizes.stages}
        scratch = _Scratch(
            kernel=_packed_tile((sizes.stages, sizes.block_columns, BLOCK_DEPTH), kernel.dtype),
            scales=plgpu.SMEM((sizes.stages, self.groups_of_step, sizes.block_columns), scales.dtype),
            x=tiles.tile((sizes.stages, sizes.block_rows, BLOCK_DEPTH), x.dtype, BLOCK_DEPTH // self.groups_of_step),
            full=plgpu.Barrier(num_arrivals=3, **stages),
            empty=plgpu.Barrier(num_arrivals=sizes.consumers, **stages),
            wide=tiles.probabilities_tile((sizes.consumers, WGMMA_ROWS, BLOCK_DEPTH), x.dtype),
        )

        def warpgroup(scratch: _Scratch) -> None:
            number, several = lax.axis_index("warpgroup"), sizes.consumers > 1

            @pl.when(number == sizes.consumers)
            def produce():
                if several:
                    plgpu.set_max_registers(_REGISTERS[sizes.consumers][0], action="decrease")
                self._produce(x, kernel, scales, layer[0], scratch)

            @pl.when(number < sizes.consumers)
            def consume():
                if several:
                    plgpu.set_max_registers(_REGISTERS[sizes.consumers][1], action="increase")
                self._consume(sums, scratch, number)

        pl.run_scoped(warpgroup, scratch, collective_axes="warpgroup")

    def _for_each_tile(self, visit: Callable[[ProductTile, Any], None]) -> Any:
        """Calls `visit(work tile, steps before it)` for each of the block's; the steps in all."""
        own, steps, splits = lax.axis_index("block"), pl.cdiv(self.depth, BLOCK_DEPTH), self.sizes.splits

        def visit_tile(i, done):
            number = own + i * self.num_blocks
            number, row = lax.div(number, self.row_blocks), lax.rem(number, self.row_blocks)
            split, block = lax.div(number, self.column_blocks), lax.rem(number, self.column_blocks)
            first, end = (lax.div((split + side) * steps, splits) for side in range(2))
            visit(ProductTile(row, block, split, first, end - first), done)
            return done + end - first

        tiles_here = lax.div(self.num_tiles - own + self.num_blocks - 1, self.num_blocks)
        return lax.fori_loop(0, tiles_here, visit_tile, jnp.int32(0))

    def _produce(self, x: Any, kernel: Any, scales: Any, layer: Any, scratch: _Scratch) -> None:
        sizes = self.sizes

        def copy_tile(tile: ProductTile, done):
            columns = pl.ds(tile.column_block * sizes.block_columns, sizes.block_columns)
            rows = pl.ds(tile.row_block * sizes.block_rows, sizes.block_rows)

            @pl.loop(0, tile.steps)
            def copy_step(k):
                stage = lax.rem(done + k, sizes.stages)
                pl.when(done + k >= sizes.stages)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                begin = (tile.first + k) * BLOCK_DEPTH
                depth, groups = pl.ds(begin, BLOCK_DEPTH), pl.ds(lax.div(begin, self.group_size), self.groups_of_step)
                full = scratch.full.at[stage]
                plgpu.copy_gmem_to_smem(kernel.at[layer, columns, depth], scratch.kernel.at[stage], full)
                plgpu.copy_gmem_to_smem(scales.at[layer, groups, columns], scratch.scales.at[stage], full)
                plgpu.copy_gmem_to_smem(x.at[rows, depth], scratch.x.at[stage], full)

        steps = self._for_each_tile(copy_tile)
        wait_for_last(scratch.empty, steps, sizes.stages)

    def _consume(self, sums: Any, scratch: _Scratch, number: Any) -> None:
        stages = self.sizes.stages
        own = pl.ds(pl.multiple_of(number * WGMMA_ROWS, WGMMA_ROWS), WGMMA_ROWS)
        shape = (WGMMA_ROWS, self.sizes.block_rows)

        def multiply_tile(tile: ProductTile, done):
            def multiply_step(k, total):
                stage = lax.rem(done + k, stages)
                plgpu.barrier_wait(scratch.full.at[stage])
                weights = self._unpacked(scratch, stage, own, number)
                for group in range(self.groups_of_step):
                    total += self._of_group(group, weights, scratch, stage, own)
                plgpu.barrier_arrive(scratch.empty.at[stage])
                return total

            none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            total = lax.fori_loop(0, tile.steps, multiply_step, none)
            begin = tile.column_block * self.sizes.block_columns + number * WGMMA_ROWS
            store_turned(sums, tile.split, tile.row_block * self.sizes.block_rows, begin, total)

        self._for_each_tile(multiply_tile)

    def _unpacked(self, scratch: _Scratch, stage: Any, own: Any, number: Any) -> Any:
        weights = scratch.kernel.at[stage, own]
        if scratch.wide is not None:
            wide = scratch.wide.at[number]
            wide[...] = unpacked(weights, wide.dtype)
            plgpu.commit_smem()
            return wide
        return unpacked(weights, scratch.x.dtype)

    def _of_group(self, group: int, weights: Any, scratch: _Scratch, stage: Any, own: Any) -> Any:
        """The sums of a group's products, times its scales."""
        depth = BLOCK_DEPTH // self.groups_of_step
        x = scratch.x.at[stage, :, pl.ds(group * depth, depth)].transpose((1, 0))
        begin, end = group * depth, (group + 1) * depth
        part = weights[:, begin:end] if scratch.wide is None else weights.at[:, pl.ds(begin, depth)]

        def product(acc):
            plgpu.wgmma(acc, part, x)
            plgpu.wgmma_wait(0)
            return acc[...]

        result = pl.run_scoped(product, tiles.accumulator(WGMMA_ROWS, self.sizes.block_rows))
        factors = plgpu.load(
            scratch.scales.at[stage, group, own], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
        ).astype(jnp.float32)
        return result * lax.broadcast_in_dim(factors, result.shape, [0])


def _packed_tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in which rows of 64 bytes lie so that threads read 8 of them without waiting for each other."""
    tiling: Any = plgpu.TilingTransform  # typed as abstract
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((TILED_ROWS, BLOCK_DEPTH)), swizzling(BLOCK_DEPTH // 2)))
