"""A product with weights of 4 bits, which are made wider in registers on their way to Hopper's tensor cores.

grid (blocks)            an SM each; takes every blocks-th work tile: some columns of the result, a share of the depth
  producer warpgroup     TMA: weights, their scales and rows of x, stages ahead, across work tiles
  consumer warpgroups    acc^T += w x^T: 64 columns of the result each, from registers; the rows of x on its columns
  full                   producer -> consumers: a stage has arrived
  empty                  consumers -> producer: the stage may be overwritten

The numbers of a group, less its zero point, are multiplied exactly, and their sum with its scale. The depth is split so
that all SMs have as much to read (split-K): each split's sums stand by themselves, in float32, or rounded: those of
many rows are what a product waits for most, and leave as whole tiles then, by TMA.

One row may be a sum that is normed first: the consumers do that together, while weights are on their way.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from jattn_kernels.call import NormCall
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.product_tiles import ProductTile, wait_for_last
from jattn_kernels.mosaic.sm90.common.shared_row import Meeting, RowOperands, meeting, share_of_row, store_share
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.common.turned import copy_turned, store_turned
from jattn_kernels.mosaic.sm90.int4 import strips
from jattn_kernels.mosaic.sm90.int4.stage_products import StageProducts
from jattn_kernels.mosaic.sm90.int4.tile_sizes import Int4Tiles
from jattn_kernels.mosaic.sm90.int4.unpacked import load_packed, packed_tile

_REGISTERS = {
    2: (40, 232),
    3: (40, 152),
    4: (32, 112),
}  # by consumer warpgroups: of a thread of the producer, and of theirs
_WIDTHS = 32  # that a strip begins at a multiple of


class _Scratch(NamedTuple):
    kernel: Any  # (stages, columns, block_depth)
    of_groups: tuple[Any, ...]  # (stages, groups or more, columns): scales, and zero points if there are some
    x: Any  # (stages, block_rows, block_depth); (8, depth) of a row that is whole
    full: Any
    empty: Any
    others: Any  # (strips, takers - 1, 64, block_rows): what all but a strip's first taker have, or its gated half does
    others_full: Any
    others_free: Any
    out: Any  # (strips, 1, block_rows, 64), of sums that are rounded; None of others
    wide: Any  # (consumers, columns, block_depth): where the interpreter keeps wider weights; None on a GPU
    meeting: Meeting | None = None


class _Operands(NamedTuple):
    x: Any
    kernel: Any
    of_groups: tuple[Any, ...]
    layer: Any
    row: RowOperands | None


def int4_matmul(
    x: Float[Array, "T D"],
    kernel: Any,
    of_groups: tuple[Shaped[Array, "L G F"], ...],
    layer_index: Int32[Array, ""],
    sizes: Int4Tiles,
    *,
    num_rows: int,
    rounded: bool = False,
    activation: strips.Activation | None = None,
    norm: NormCall | None = None,
    row: RowOperands | None = None,
) -> tuple[Float[Array, "S R O"], list[Float[Array, "1 D"]]]:
    """x @ kernel^T in splits, which add up to it; and if x is normed first, its sum, and the norm.

    Args:
        x: As it is if the kernel is interleaved.
        kernel: int4 [L, F, D].
        of_groups: Scales of a group of inputs of each output; and zero points, if there are some.
        sizes: Of the work tiles.
        num_rows: Of the result; those past x's are 0.
        rounded: Whether each split's sums are rounded to x's dtype; of several rows the result has whole tiles then.
        activation: Of the rounded halves of the only split, which is stored in place of them.
        norm, row: Of one row that is added up and normed first, what is done and what with.
    """
    depth, columns = x.shape[1], kernel.shape[1]
    if rounded and num_rows > 1:
        num_rows = pl.cdiv(num_rows, sizes.block_rows) * sizes.block_rows
    dtype = x.dtype if rounded else jnp.dtype(jnp.float32)
    product = _Product(
        sizes=sizes,
        dtype=dtype,
        rows=num_rows,
        depth=depth,
        columns=columns,
        groups=of_groups[0].shape[1],
        norm=norm,
        activation=activation,
    )
    leaves, tree = jax.tree.flatten(_Operands(x, kernel, of_groups, layer_index.reshape(1), row))
    sums = jax.ShapeDtypeStruct((sizes.splits, num_rows, columns // sizes.halves), dtype)
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
    dtype: Any  # of the sums
    rows: int
    depth: int
    columns: int
    groups: int
    norm: NormCall | None
    activation: strips.Activation | None = None

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
        return min(self.num_tiles, tiles.num_sms())

    @property
    def group_size(self) -> int:
        return self.depth // self.groups

    @property
    def products(self) -> StageProducts:
        """A stage's."""
        return StageProducts(sizes=self.sizes, group_size=self.group_size)

    def body(self, tree: Any, *refs: Any) -> None:
        sizes = self.sizes
        operands, (sums, *of_row) = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves :]
        stages: dict[str, Any] = {"num_barriers": sizes.stages}
        rows = (sizes.stages, sizes.block_rows, sizes.block_depth) if not self.whole else (TILED_ROWS, self.depth)
        copies = 1 + len(operands.of_groups)
        scratch = _Scratch(
            kernel=packed_tile((sizes.stages, sizes.block_columns, sizes.block_depth), operands.kernel.dtype),
            of_groups=tuple(map(self._of_groups, operands.of_groups)),
            x=tiles.tile(rows, operands.x.dtype, self.products.part_depth),
            full=plgpu.Barrier(num_arrivals=copies * sizes.halves + (0 if self.whole else 1), **stages),
            empty=plgpu.Barrier(num_arrivals=sizes.strips, **stages),
            others=None,
            others_full=None,
            others_free=None,
            out=self._out_tile(),
            wide=tiles.probabilities_tile((sizes.consumers, WGMMA_ROWS, sizes.block_depth), operands.x.dtype),
        )
        if sizes.takers > 1:
            scratch = scratch._replace(**strips.others(sizes.strips, sizes.takers - 1, sizes.block_rows, jnp.float32))
        if sizes.halves > 1:
            scratch = scratch._replace(**strips.others(sizes.half_strips, 1, sizes.block_rows, self.dtype))
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

    def _of_groups(self, factors: Any) -> Any:
        """Shared memory for what columns have of each group."""
        rows = tiles.aligned_rows(self.products.groups, self.sizes.half_columns * jnp.dtype(factors.dtype).itemsize)
        return plgpu.SMEM((self.sizes.stages * self.sizes.halves, rows, self.sizes.half_columns), factors.dtype)

    @property
    def _overlap(self) -> int:
        """Columns that the last two strips of a work tile's half have in common."""
        return -self.sizes.half_columns % WGMMA_ROWS

    def _out_tile(self) -> Any:
        if self.dtype == jnp.float32:
            return None
        shape = self.sizes.half_strips, 1, self.sizes.block_rows, WGMMA_ROWS
        return tiles.tile(shape, self.dtype, copied_columns=math.gcd(self._overlap, WGMMA_ROWS))

    def _for_each_tile(self, visit: Callable[[ProductTile, Any], None]) -> Any:
        """Calls `visit(work tile, steps before it)` for each of the block's; the steps in all."""
        own, steps, splits = lax.axis_index("block"), pl.cdiv(self.depth, self.sizes.block_depth), self.sizes.splits

        def visit_tile(i, done):
            number = own + i * self.num_blocks
            number, row = lax.div(number, self.row_blocks), lax.rem(number, self.row_blocks)
            split, block = lax.div(number, self.column_blocks), lax.rem(number, self.column_blocks)
            first, end = (lax.div((split + side) * steps, splits) for side in range(2))
            visit(ProductTile(row, block, split, first, end - first), done)
            return done + end - first

        tiles_here = lax.div(self.num_tiles - own + self.num_blocks - 1, self.num_blocks)
        return lax.fori_loop(0, tiles_here, visit_tile, jnp.int32(0))

    def _produce(self, operands: _Operands, scratch: _Scratch) -> None:
        sizes, layer = self.sizes, operands.layer[0]

        def copy_tile(tile: ProductTile, done):
            rows = pl.ds(tile.row_block * sizes.block_rows, sizes.block_rows)

            @pl.loop(0, tile.steps)
            def copy_step(k):
                stage = lax.rem(done + k, sizes.stages)
                pl.when(done + k >= sizes.stages)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                begin = (tile.first + k) * sizes.block_depth
                depth, groups = (
                    pl.ds(begin, sizes.block_depth),
                    pl.ds(lax.div(begin, self.group_size), self.products.groups),
                )
                full, width = scratch.full.at[stage], sizes.half_columns
                for half in range(sizes.halves):
                    columns = pl.ds(half * (self.columns // sizes.halves) + tile.column_block * width, width)
                    kernel = scratch.kernel.at[stage]
                    if sizes.halves > 1:
                        kernel = scratch.kernel.at[stage, pl.ds(half * width, width)]
                    place = stage * sizes.halves + half, pl.ds(0, self.products.groups)
                    plgpu.copy_gmem_to_smem(operands.kernel.at[layer, columns, depth], kernel, full)
                    for factors, target in zip(operands.of_groups, scratch.of_groups, strict=True):
                        plgpu.copy_gmem_to_smem(factors.at[layer, groups, columns], target.at[place], full)
                if not self.whole:
                    plgpu.copy_gmem_to_smem(operands.x.at[rows, depth], scratch.x.at[stage], full)

        steps = self._for_each_tile(copy_tile)
        wait_for_last(scratch.empty, steps, sizes.stages)

    def _hold_row(self, operands: _Operands, outs: tuple[Any, ...], scratch: _Scratch, number: Any) -> None:
        place = scratch.meeting
        assert place is not None

        def make_share():
            share, begin = share_of_row(operands.x, operands.row, outs, self.norm, place, number)
            store_share(scratch.x, begin, share, self.products.tiled_columns)

        place.hold(number, make_share)

    def _consume(self, sums: Any, scratch: _Scratch, number: Any) -> None:
        stages = self.sizes.stages
        strip, taker = self._strip_and_taker(number)
        halves, half_strips, half = self.sizes.halves, self.sizes.half_strips, 0
        if halves > 1:
            half, strip = lax.div(strip, half_strips), lax.rem(strip, half_strips)
        begin_of_own, multiple = strip * WGMMA_ROWS, math.gcd(_WIDTHS, self.sizes.half_columns)
        if self._overlap:  # the last strip begins in the one before
            begin_of_own = jnp.minimum(begin_of_own, self.sizes.half_columns - WGMMA_ROWS)
        begin_of_own = pl.multiple_of(begin_of_own, multiple)
        own, of_scales = (
            pl.ds(pl.multiple_of(begin, multiple), WGMMA_ROWS)
            for begin in (half * self.sizes.half_columns + begin_of_own, begin_of_own)
        )
        shape, takers = (WGMMA_ROWS, self.sizes.block_rows), self.sizes.takers

        def multiply_tile(tile: ProductTile, done):
            first_own, steps = jnp.int32(0), tile.steps
            if takers > 1:
                first_own = lax.rem(taker + takers - lax.rem(done, takers), takers)
                steps = lax.div(tile.steps - first_own + takers - 1, takers)

            def multiply_step(i, carry):
                total, stage = carry
                k = i if takers == 1 else first_own + i * takers
                plgpu.barrier_wait(scratch.full.at[stage])
                packed = load_packed(scratch.kernel.at[stage, own])
                first = (tile.first + k) * self.sizes.block_depth if self.whole else stage
                total = self.products.added(total, packed, scratch, stage * halves + half, first, of_scales, number)
                plgpu.barrier_arrive(scratch.empty.at[stage])
                following = stage + takers
                return total, jnp.where(following >= stages, following - stages, following)

            none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            total, _ = lax.fori_loop(0, steps, multiply_step, (none, lax.rem(done + first_own, stages)))
            begin = tile.column_block * self.sizes.half_columns + begin_of_own
            if self.whole:  # rows of the tile past its first are any
                row = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
                total = jnp.where(row == 0, total, 0.0)
            first_row = tile.row_block * self.sizes.block_rows
            if scratch.out is None:
                store = functools.partial(store_turned, sums, tile.split, first_row, begin)
            else:
                shared = {"overlap": self._overlap, "is_last": strip == half_strips - 1}
                target = scratch.out.at[strip], sums.at[tile.split], first_row, begin
                store = functools.partial(copy_turned, *target, **shared)
            if takers > 1:
                strips.of_all_takers(total, scratch, strip, taker, takers, store)
            elif halves > 1:
                assert self.activation is not None
                strips.of_both_halves(total, scratch, strip, half, self.activation, store)
            else:
                store(total)

        self._for_each_tile(multiply_tile)
        if scratch.out is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _strip_and_taker(self, number: Any) -> tuple[Any, Any]:
        """Of a consumer."""
        if self.sizes.takers == 1:
            return number, jnp.int32(0)
        return lax.rem(number, self.sizes.strips), lax.div(number, self.sizes.strips)
