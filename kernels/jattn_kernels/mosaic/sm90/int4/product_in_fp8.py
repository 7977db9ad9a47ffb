"""The product with weights of 4 bits as `product.py` has it, but in fp8: weights are widened by three instructions for 8.

  rows                    in two terms of fp8, which add up to them: both are multiplied into the same sums
  a group's sum           starts from 8 times less the sum of the row's numbers, as weights are multiplied plus 8
  scales of rows          come last

The tensor cores keep some 13 bits of a sum in fp8: none is of more than 128 inputs.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.product_tiles import ProductTile, wait_for_last
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.common.turned import store_turned
from jattn_kernels.mosaic.sm90.int4.bytes import as_fp8
from jattn_kernels.mosaic.sm90.int4.product import Product, packed_tile
from jattn_kernels.mosaic.sm90.int4.terms import TERMS, terms_of
from jattn_kernels.mosaic.sm90.int4.tile_sizes import BLOCK_DEPTH, Int4Tiles
from jattn_kernels.quantized import FP8


class _Scratch(NamedTuple):
    kernel: Any  # (stages, columns, 128)
    scales: Any  # (stages, groups, columns)
    x: Any  # (stages, 2, block_rows, 128)
    sums: Any  # (stages, groups, block_rows and more)
    full: Any
    empty: Any
    wide: Any  # (consumers, 64, 128): where the interpreter keeps weights that became fp8; None on a GPU


def int4_matmul_in_fp8(
    x: Float[Array, "T D"],
    kernel: Any,
    scales: Float[Array, "L G F"],
    layer_index: Int32[Array, ""],
    sizes: Int4Tiles,
    *,
    num_rows: int,
) -> Float32[Array, "S R F"]:
    """`int4_matmul` of rows of bfloat16 in any one block, whose columns lie as they are."""
    assert num_rows <= sizes.block_rows
    depth, columns = x.shape[1], kernel.shape[1]
    product = _ProductInFp8(sizes=sizes, rows=num_rows, depth=depth, columns=columns, groups=scales.shape[1])
    terms = terms_of(x, num_rows=sizes.block_rows, group=BLOCK_DEPTH // product.groups_of_step)
    run = launch.kernel(
        product.body_of_terms,
        out_type=jax.ShapeDtypeStruct((sizes.splits, num_rows, columns), jnp.float32),
        grid=(product.num_blocks,),
        grid_names=("block",),
        num_threads=sizes.consumers + 1,
        reduction_bytes=0,
        kernel_name="int4_matmul_in_fp8",
    )
    return run(*terms, kernel, scales, layer_index.reshape(1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ProductInFp8(Product):
    def body_of_terms(
        self, x: Any, group_sums: Any, row_scales: Any, kernel: Any, scales: Any, layer: Any, sums: Any
    ) -> None:
        sizes, groups = self.sizes, self.groups_of_step
        stages: dict[str, Any] = {"num_barriers": sizes.stages}
        rows = sizes.stages, TERMS, sizes.block_rows, BLOCK_DEPTH
        scratch = _Scratch(
            kernel=packed_tile((sizes.stages, sizes.block_columns, BLOCK_DEPTH), kernel.dtype),
            scales=plgpu.SMEM((sizes.stages, groups, sizes.block_columns), scales.dtype),
            x=tiles.tile(rows, FP8, BLOCK_DEPTH // groups),
            sums=plgpu.SMEM((sizes.stages, groups, group_sums.shape[1]), jnp.float32),
            full=plgpu.Barrier(num_arrivals=3 + TERMS, **stages),
            empty=plgpu.Barrier(num_arrivals=sizes.consumers, **stages),
            wide=tiles.probabilities_tile((sizes.consumers, WGMMA_ROWS, BLOCK_DEPTH), FP8),
        )

        self.in_warpgroups(
            scratch,
            lambda scratch: self._copy((x, group_sums, kernel, scales), layer[0], scratch),
            lambda scratch, number: self._multiply(row_scales, sums, scratch, number),
        )

    def _copy(self, operands: Any, layer: Any, scratch: _Scratch) -> None:
        x, group_sums, kernel, scales = operands
        sizes, groups = self.sizes, self.groups_of_step

        def copy_tile(tile: ProductTile, done):
            columns = pl.ds(tile.column_block * sizes.block_columns, sizes.block_columns)

            @pl.loop(0, tile.steps)
            def copy_step(k):
                stage = lax.rem(done + k, sizes.stages)
                pl.when(done + k >= sizes.stages)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                begin = (tile.first + k) * BLOCK_DEPTH
                depth, full = pl.ds(begin, BLOCK_DEPTH), scratch.full.at[stage]
                of_groups = pl.ds(lax.div(begin, self.group_size), groups)
                plgpu.copy_gmem_to_smem(kernel.at[layer, columns, depth], scratch.kernel.at[stage], full)
                plgpu.copy_gmem_to_smem(scales.at[layer, of_groups, columns], scratch.scales.at[stage], full)
                of_step = pl.ds((tile.first + k) * groups, groups)
                plgpu.copy_gmem_to_smem(group_sums.at[of_step], scratch.sums.at[stage], full)
                for term in range(TERMS):
                    plgpu.copy_gmem_to_smem(x.at[term, :, depth], scratch.x.at[stage, term], full)

        steps = self.for_each_tile(copy_tile)
        wait_for_last(scratch.empty, steps, sizes.stages)

    def _multiply(self, row_scales: Any, sums: Any, scratch: _Scratch, number: Any) -> None:
        stages, count = self.sizes.stages, self.sizes.block_rows
        own = pl.ds(pl.multiple_of(number * WGMMA_ROWS, WGMMA_ROWS), WGMMA_ROWS)
        shape, of_rows = (WGMMA_ROWS, count), plgpu.Layout.WGMMA.reduce(0)

        def multiply_tile(tile: ProductTile, done):
            def multiply_step(k, total):
                stage = lax.rem(done + k, stages)
                plgpu.barrier_wait(scratch.full.at[stage])
                weights = self._in_fp8(scratch, stage, own, number)
                for group in range(self.groups_of_step):
                    total += self._of_group_in_fp8(group, weights, scratch, stage, own)
                plgpu.barrier_arrive(scratch.empty.at[stage])
                return total

            none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            total = lax.fori_loop(0, tile.steps, multiply_step, none)
            factors = plgpu.load(row_scales, layout=of_rows, optimized=False)
            total *= lax.broadcast_in_dim(factors, shape, [1])
            store_turned(sums, tile.split, 0, tile.column_block * self.sizes.block_columns + own.start, total)

        self.for_each_tile(multiply_tile)

    def _in_fp8(self, scratch: _Scratch, stage: Any, own: Any, number: Any) -> Any:
        weights = as_fp8(scratch.kernel.at[stage, own])
        if scratch.wide is None:
            return weights
        scratch.wide[number] = weights
        plgpu.commit_smem()
        return scratch.wide.at[number]

    def _of_group_in_fp8(self, group: int, weights: Any, scratch: _Scratch, stage: Any, own: Any) -> Any:
        """The sums of a group's products, times its scales."""
        depth, shape = BLOCK_DEPTH // self.groups_of_step, (WGMMA_ROWS, self.sizes.block_rows)
        begin, inputs = group * depth, pl.ds(group * depth, depth)
        part = weights[:, begin : begin + depth] if scratch.wide is None else weights.at[:, inputs]
        less = plgpu.load(
            scratch.sums.at[stage, group, pl.ds(0, shape[1])], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
        )
        start = lax.broadcast_in_dim(less, shape, [1])

        def product(acc):
            for term in range(TERMS):
                plgpu.wgmma(acc, part, scratch.x.at[stage, term, :, inputs].transpose((1, 0)))
            plgpu.wgmma_wait(0)

        def product_alone(acc):
            product(acc)
            return acc[...]

        if scratch.wide is None:
            initial: Any = plgpu.WGMMAAccumulatorRef.init(start)
            result = pl.run_state(product)(initial)
        else:  # the interpreter starts from 0 only
            result = start + pl.run_scoped(product_alone, tiles.accumulator(*shape))
        factors = plgpu.load(
            scratch.scales.at[stage, group, own], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
        ).astype(jnp.float32)
        return result * lax.broadcast_in_dim(factors, shape, [0])
