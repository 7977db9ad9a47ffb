"""A product with weights of 4 bits, which are made wider in registers on their way to Hopper's tensor cores.

grid (blocks)            an SM each; takes every blocks-th work tile: some columns of the result, a share of the depth
  producer warpgroup     TMA: weights, their scales and rows of x, stages ahead, across work tiles
  consumer warpgroups    acc^T += w x^T: 64 columns of the result each, from registers; the rows of x on its columns
  full                   producer -> consumers: a stage has arrived
  empty                  consumers -> producer: the stage may be overwritten

The numbers of a group are multiplied as they are, exactly, and their sum with the group's scale. The depth is split so
that all SMs have as much to read (split-K): each split's sums stand by themselves, in float32.

One row may be a sum that is normed first: the consumers do that together, while weights are on their way.
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
from jaxtyping import Array, Float, Float32, Int32

from jattn_kernels.call import NormCall
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.product_tiles import ProductTile, column_step, first_column, wait_for_last
from jattn_kernels.mosaic.sm90.common.shared_row import Meeting, RowOperands, meeting, share_of_row
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.common.turned import store_staged, store_turned
from jattn_kernels.mosaic.sm90.int4.tile_sizes import PART_DEPTH, STAGED_ROWS, Int4Tiles, sharer
from jattn_kernels.mosaic.sm90.int4.unpacked import load_packed, load_scales, store_in_order, unpacked

# By consumer warpgroups: of a thread of the producer, and of theirs.
_REGISTERS = {2: (40, 232), 3: (40, 152), 4: (32, 112)}
_ROWS_UNDER_WAY = 128  # of products whose sums fit the registers beside the weights
_MOST_UNDER_WAY = 4  # of these products
SCALES_WEIGHTS, UNDER_WAY_DEPTH = False, 64
_TILED_COLUMNS = 64  # that lie together in a tile, of 16 bits


class _Scratch(NamedTuple):
    kernel: Any  # (stages, columns, block_depth)
    scales: Any  # (stages, groups, columns)
    x: Any  # (stages, block_rows, block_depth); (8, depth) of a row that is whole
    full: Any
    empty: Any
    out: Any  # (consumers, 2, staged rows, 64), or None where splits are stored
    others: Any  # (strips, 64, block_rows): sums of the other consumer of a strip, or None
    others_full: Any
    others_free: Any
    wide: Any  # (consumers, columns, block_depth): where the interpreter keeps wider weights; None on a GPU
    meeting: Meeting | None = None


class _Operands(NamedTuple):
    x: Any
    kernel: Any
    scales: Any
    layer: Any
    row: RowOperands | None


def int4_matmul(
    x: Float[Array, "T D"],
    kernel: Any,
    scales: Float[Array, "L G F"],
    layer_index: Int32[Array, ""],
    sizes: Int4Tiles,
    *,
    num_rows: int,
    norm: NormCall | None = None,
    row: RowOperands | None = None,
) -> tuple[Float32[Array, "S R F"] | Float[Array, "T F"], list[Float[Array, "1 D"]]]:
    """x @ kernel^T in splits, which add up to it, or itself; and if x is normed first, its sum, and the norm.

    Args:
        x: With its columns `in_order`; as they are if the row is whole.
        kernel: int4 [L, F, D].
        scales: Of a group of inputs of each output.
        sizes: Of the work tiles.
        num_rows: Of the result; those past x's are 0.
        norm, row: Of one row that is added up and normed first, what is done and what with.
    """
    depth, columns = x.shape[1], kernel.shape[1]
    product = _Product(
        sizes=sizes,
        rows=num_rows,
        depth=depth,
        columns=columns,
        groups=scales.shape[1],
        own_scales=scales.dtype == x.dtype,
        norm=norm,
    )
    leaves, tree = jax.tree.flatten(_Operands(x, kernel, scales, layer_index.reshape(1), row))
    if sizes.in_splits:
        sums = jax.ShapeDtypeStruct((sizes.splits, num_rows, columns), jnp.float32)
    else:
        sums = jax.ShapeDtypeStruct((num_rows, columns), x.dtype)
    run = launch.kernel(
        functools.partial(product.body, tree),
        out_type=[sums] if norm is None else [sums, *[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2],
        grid=(product.num_blocks,),
        grid_names=("block",),
        num_threads=sizes.consumers + 1,
        reduction_bytes=0,
        kernel_name="int4_matmul",
    )
    parts, *of_row = run(*leaves)
    return parts, of_row


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    sizes: Int4Tiles
    rows: int
    depth: int
    columns: int
    groups: int
    own_scales: bool  # in the dtype of x
    norm: NormCall | None

    @property
    def whole(self) -> bool:
        """Whether the row is in shared memory all the time."""
        return self.sizes.whole_row

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
        return tiles.num_sms() if self.sizes.even else min(self.num_tiles, tiles.num_sms())

    @property
    def group_size(self) -> int:
        return self.depth // self.groups

    @property
    def scales_weights(self) -> bool:
        """Whether weights are multiplied with their scales, and not a group's sums."""
        return SCALES_WEIGHTS and self.own_scales and self.sizes.block_rows > TILED_ROWS

    @property
    def groups_of_step(self) -> int:
        return max(1, self.sizes.block_depth // self.group_size)

    @property
    def part_depth(self) -> int:
        """Inputs of a step that are multiplied before a scale is."""
        return min(PART_DEPTH, self.group_size)

    @property
    def batches(self) -> list[range]:
        """Where the parts of a step begin, those together that are under way at the same time."""
        begins = range(0, self.sizes.block_depth, self.part_depth)
        together = min(max(1, _ROWS_UNDER_WAY // self.sizes.block_rows), _MOST_UNDER_WAY)
        return [begins[i : i + together] for i in range(0, len(begins), together)]

    def body(self, tree: Any, *refs: Any) -> None:
        sizes = self.sizes
        operands, (sums, *of_row) = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves :]
        stages: dict[str, Any] = {"num_barriers": sizes.stages}
        rows = (sizes.stages, sizes.block_rows, sizes.block_depth) if not self.whole else (TILED_ROWS, self.depth)
        strips = sizes.consumers // sizes.takers
        staging = (strips, 2, STAGED_ROWS, WGMMA_ROWS)
        scratch = _Scratch(
            kernel=_packed_tile((sizes.stages, sizes.block_columns, sizes.block_depth), operands.kernel.dtype),
            scales=plgpu.SMEM((sizes.stages, self.groups_of_step, sizes.block_columns), operands.scales.dtype),
            x=tiles.tile(rows, operands.x.dtype, self.part_depth),
            full=plgpu.Barrier(num_arrivals=2 if self.whole else 3, **stages),
            empty=plgpu.Barrier(num_arrivals=strips, **stages),
            out=None if sizes.in_splits else tiles.tile(staging, operands.x.dtype, column_step(sizes.block_columns)),
            others=None
            if sizes.takers == 1
            else plgpu.SMEM((strips, sizes.takers - 1, WGMMA_ROWS, sizes.block_rows), jnp.float32),
            others_full=plgpu.Barrier(num_arrivals=max(1, sizes.takers - 1), num_barriers=strips),
            others_free=plgpu.Barrier(num_barriers=strips),
            wide=tiles.probabilities_tile((sizes.consumers, WGMMA_ROWS, sizes.block_depth), operands.x.dtype),
        )
        if self.whole:
            scratch = scratch._replace(meeting=meeting(self.depth, sizes.consumers))

        def warpgroup(scratch: _Scratch) -> None:
            number, several = lax.axis_index("warpgroup"), sizes.consumers > 1

            @pl.when(number == sizes.consumers)
            def produce():
                if several:
                    plgpu.set_max_registers(_REGISTERS[sizes.consumers][0], action="decrease")
                self._produce(operands, scratch)

            @pl.when(number < sizes.consumers)
            def consume():
                if several:
                    plgpu.set_max_registers(_REGISTERS[sizes.consumers][1], action="increase")
                if self.whole:
                    self._hold_row(operands, tuple(of_row), scratch, number)
                self._consume(sums, scratch, number)

        pl.run_scoped(warpgroup, scratch, collective_axes="warpgroup")

    def _for_each_tile(self, visit: Callable[[ProductTile, Any], None]) -> Any:
        """Calls `visit(work tile, steps before it)` for each of the block's; the steps in all."""
        own, steps, splits = lax.axis_index("block"), pl.cdiv(self.depth, self.sizes.block_depth), self.sizes.splits
        if self.sizes.even:
            return self._for_each_of_share(own, steps, visit)

        def visit_tile(i, done):
            number = own + i * self.num_blocks
            number, row = lax.div(number, self.row_blocks), lax.rem(number, self.row_blocks)
            split, block = lax.div(number, self.column_blocks), lax.rem(number, self.column_blocks)
            first, end = (lax.div((split + side) * steps, splits) for side in range(2))
            visit(ProductTile(row, block, split, first, end - first), done)
            return done + end - first

        tiles_here = lax.div(self.num_tiles - own + self.num_blocks - 1, self.num_blocks)
        return lax.fori_loop(0, tiles_here, visit_tile, jnp.int32(0))

    def _for_each_of_share(self, own: Any, steps: int, visit: Callable[[ProductTile, Any], None]) -> Any:
        total, blocks = self.column_blocks * steps, self.num_blocks
        begin, end = (lax.div((own + side) * total, blocks) for side in range(2))
        first = lax.div(begin, steps)

        def visit_tile(i, done):
            block = first + i
            of_block = block * steps
            start, stop = jnp.maximum(begin, of_block), jnp.minimum(end, of_block + steps)
            split = own - sharer(of_block, total, blocks)
            visit(ProductTile(0, block, split, start - of_block, stop - start), done)
            return done + stop - start

        return lax.fori_loop(0, lax.div(end - 1, steps) - first + 1, visit_tile, jnp.int32(0))

    def _produce(self, operands: _Operands, scratch: _Scratch) -> None:
        sizes, layer = self.sizes, operands.layer[0]

        def copy_tile(tile: ProductTile, done):
            columns = pl.ds(tile.column_block * sizes.block_columns, sizes.block_columns)
            rows = pl.ds(tile.row_block * sizes.block_rows, sizes.block_rows)

            @pl.loop(0, tile.steps)
            def copy_step(k):
                stage = lax.rem(done + k, sizes.stages)
                pl.when(done + k >= sizes.stages)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                begin = (tile.first + k) * sizes.block_depth
                depth, groups = (
                    pl.ds(begin, sizes.block_depth),
                    pl.ds(lax.div(begin, self.group_size), self.groups_of_step),
                )
                full = scratch.full.at[stage]
                plgpu.copy_gmem_to_smem(operands.kernel.at[layer, columns, depth], scratch.kernel.at[stage], full)
                plgpu.copy_gmem_to_smem(operands.scales.at[layer, groups, columns], scratch.scales.at[stage], full)
                if not self.whole:
                    plgpu.copy_gmem_to_smem(operands.x.at[rows, depth], scratch.x.at[stage], full)

        steps = self._for_each_tile(copy_tile)
        wait_for_last(scratch.empty, steps, sizes.stages)

    def _hold_row(self, operands: _Operands, outs: tuple[Any, ...], scratch: _Scratch, number: Any) -> None:
        place = scratch.meeting
        assert place is not None

        def make_share():
            share, begin = share_of_row(operands.x, operands.row, outs, self.norm, place, number)
            store_in_order(scratch.x, begin, share, min(self.part_depth, _TILED_COLUMNS))

        place.hold(number, make_share)

    def _consume(self, sums: Any, scratch: _Scratch, number: Any) -> None:
        stages = self.sizes.stages
        strip = lax.rem(number, self.sizes.consumers // self.sizes.takers)
        begin_of_own = first_column(self.sizes.block_columns, strip)
        own = pl.ds(begin_of_own, WGMMA_ROWS)
        shape = (WGMMA_ROWS, self.sizes.block_rows)

        takers = self.sizes.takers
        taker = lax.div(number, self.sizes.consumers // takers)

        def multiply_tile(tile: ProductTile, done):
            own_first = lax.rem(taker + takers - lax.rem(done, takers), takers)

            def multiply_step(i, total):
                k = own_first + i * takers
                stage = lax.rem(done + k, stages)
                plgpu.barrier_wait(scratch.full.at[stage])
                packed = load_packed(scratch.kernel.at[stage, own])
                first = (tile.first + k) * self.sizes.block_depth if self.whole else stage
                for begins in self.batches:
                    total = self._added(total, begins, packed, scratch, stage, first, own, number)
                plgpu.barrier_arrive(scratch.empty.at[stage])
                return total

            none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            if self.scales_weights:
                total = self._summed(scratch, tile, done, own, number)
            else:
                count = lax.div(tile.steps - own_first + takers - 1, takers)
                total = lax.fori_loop(0, count, multiply_step, none)
            begin = tile.column_block * self.sizes.block_columns + begin_of_own
            if self.whole:  # rows of the tile past its first are any
                row = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
                total = jnp.where(row == 0, total, 0.0)
            first_row = tile.row_block * self.sizes.block_rows
            if self.sizes.takers > 1:
                self._bring_together(sums, scratch, tile, total, done, number, strip, first_row, begin)
                return
            if not self.sizes.in_splits:
                store_staged(sums, scratch.out.at[number], first_row, begin, total)
                return
            store_turned(sums, tile.split, first_row, begin, total)
            if self.sizes.even:
                is_last = tile.first + tile.steps == pl.cdiv(self.depth, self.sizes.block_depth)
                for split in range(1, self.sizes.splits):
                    is_nobodys = is_last & (split > tile.split)
                    pl.when(is_nobodys)(functools.partial(store_turned, sums, split, 0, begin, none))

        self._for_each_tile(multiply_tile)
        if not self.sizes.in_splits:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _bring_together(self, sums, scratch, tile, total, done, number, strip, first_row, begin):
        strips = self.sizes.consumers // self.sizes.takers
        layout = plgpu.Layout.WGMMA

        @pl.when(number >= strips)
        def give():
            scratch.others[strip, lax.div(number, strips) - 1] = total
            plgpu.barrier_arrive(scratch.others_full.at[strip])
            plgpu.barrier_wait(scratch.others_free.at[strip])

        @pl.when(number < strips)
        def take():
            plgpu.barrier_wait(scratch.others_full.at[strip])
            of_both = total
            for other in range(self.sizes.takers - 1):
                of_both += plgpu.load(scratch.others.at[strip, other], layout=layout, optimized=False)
            plgpu.barrier_arrive(scratch.others_free.at[strip])
            if not self.sizes.in_splits:
                store_staged(sums, scratch.out.at[strip], first_row, begin, of_both)
            else:
                store_turned(sums, tile.split, first_row, begin, of_both)

    def _summed(self, scratch: _Scratch, tile: ProductTile, done: Any, own: Any, number: Any) -> Any:
        """The sums of a tile, of weights times their scales; nothing is added but by the tensor cores."""
        stages, depth = self.sizes.stages, min(UNDER_WAY_DEPTH, self.part_depth)

        takers = self.sizes.takers
        taker = lax.div(number, self.sizes.consumers // takers)
        own_first = lax.rem(taker + takers - lax.rem(done, takers), takers)

        def product(acc):
            @pl.loop(0, lax.div(tile.steps - own_first + takers - 1, takers))
            def multiply_step(i):
                k = own_first + i * takers
                stage = lax.rem(done + k, stages)
                plgpu.barrier_wait(scratch.full.at[stage])
                packed = load_packed(scratch.kernel.at[stage, own])
                scales = [load_scales(scratch.scales.at[stage, i, own]) for i in range(self.groups_of_step)]
                for begin in range(0, self.sizes.block_depth, depth):
                    of_group = scales[begin // self.group_size]
                    weights = unpacked(packed, begin, depth, scratch.x.dtype, of_group)
                    if scratch.wide is not None:
                        wide = scratch.wide.at[number, :, pl.ds(begin, depth)]
                        wide[...] = weights
                        plgpu.commit_smem()
                        weights = wide
                    plgpu.wgmma(acc, weights, scratch.x.at[stage, :, pl.ds(begin, depth)].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(scratch.empty.at[stage])

            return acc[...]

        return pl.run_scoped(product, tiles.accumulator(WGMMA_ROWS, self.sizes.block_rows))

    def _added(
        self, total: Any, begins: range, packed: Any, scratch: _Scratch, stage: Any, first: Any, own: Any, number: Any
    ) -> Any:
        """The sums with parts' products, each times its group's scales; one is made wider while another runs.

        Args:
            first: The step's first input, of a row that is all in shared memory; else its stage.
        """
        depth, layout = self.part_depth, plgpu.Layout.WGMMA.reduce(1)
        scales = [scratch.scales.at[stage, begin // self.group_size, own] for begin in begins]
        factors = [plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32) for ref in scales]

        def products(*accumulators):
            for begin, acc in zip(begins, accumulators, strict=True):
                if self.whole:
                    x = scratch.x.at[:, pl.ds(pl.multiple_of(first + begin, depth), depth)]
                else:
                    x = scratch.x.at[first, :, pl.ds(begin, depth)]
                plgpu.wgmma(acc, self._unpacked(begin, packed, scratch, number), x.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return [acc[...] for acc in accumulators]

        accumulator = tiles.accumulator(WGMMA_ROWS, self.sizes.block_rows)
        results = pl.run_scoped(products, *[accumulator] * len(begins))
        for result, factor in zip(results, factors, strict=True):
            total += result * lax.broadcast_in_dim(factor, result.shape, [0])
        return total

    def _unpacked(self, begin: int, packed: Any, scratch: _Scratch, number: Any) -> Any:
        weights = unpacked(packed, begin, self.part_depth, scratch.x.dtype)
        if scratch.wide is None:
            return weights
        wide = scratch.wide.at[number, :, pl.ds(begin, self.part_depth)]
        wide[...] = weights
        plgpu.commit_smem()
        return wide


def _packed_tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory whose rows of 64 or 128 bytes lie so that threads read 8 without waiting for each other."""
    tiling: Any = plgpu.TilingTransform  # typed as abstract
    swizzling: Any = plgpu.SwizzleTransform
    depth = shape[-1]
    return plgpu.SMEM(shape, dtype, transforms=(tiling((TILED_ROWS, depth)), swizzling(depth // 2)))
