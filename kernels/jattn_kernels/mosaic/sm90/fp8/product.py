"""A product of 8-bit rows and 8-bit weights on Hopper's tensor cores.

grid (blocks)            an SM each; takes every blocks-th work tile: rows of x, columns of the result, a share of depth
  producer warpgroup     TMA: weights and rows of x, stages ahead, across work tiles
  consumer warpgroups    acc^T += w x^T: 64 columns of the result each, on wgmma's rows; the rows of x on its columns
  full                   producer -> consumers: a stage has arrived
  empty                  consumers -> producer: the stage may be overwritten

Weights lie with their outputs first, as wgmma reads 8-bit operands along the depth only. Few rows (decode): the depth
is split so that all SMs have as much to read (split-K); each split's sums stand by themselves, times both scales. Many
(prompts): blocks of a cluster take neighbouring columns and share what they read of x, without which the L2 cache could
not bring enough.

One row is whole in shared memory if it fits: the consumers round it, while weights are on their way, and add it up and
norm it before if that is to be done.
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
from jattn_kernels.mosaic.sm90.common.product_tiles import ProductTile, summed_over_stages, wait_for_last
from jattn_kernels.mosaic.sm90.common.shared_row import Meeting, RowOperands, meeting
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.common.turned import copy_turned, store_turned
from jattn_kernels.mosaic.sm90.fp8.rounded_row import rounded_share
from jattn_kernels.mosaic.sm90.fp8.tile_sizes import BLOCK_DEPTH, WIDTHS, Fp8Tiles
from jattn_kernels.splits import Splits

_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # of a thread, with two consumer warpgroups
_EARLY_ROWS = 64  # of a work tile, up to which the scales of all are in registers while it is multiplied
_NEIGHBOURS = 16  # blocks of rows whose tiles of the same columns are computed at about the same time


class _Scratch(NamedTuple):
    kernel: Any  # (stages, columns, 128)
    x: Any  # (stages, block_rows, 128); (8, depth) of a whole row
    out: Any  # (consumers, 2, staged rows, 64), or None where splits are stored
    full: Any
    empty: Any
    meeting: Meeting | None = None
    factor: Any = None  # (1,): of that row


class _Operands(NamedTuple):
    x: Any
    x_scales: Any  # None of a whole row
    kernel: Any
    scales: Any
    layer: Any
    row: RowOperands | None = None


def fp8_matmul(
    x: Float[Array, "R D"],
    x_scales: Float32[Array, " S"] | None,
    kernel: Float[Array, "L F D"],
    scales: Float32[Array, "L F"],
    layer_index: Int32[Array, ""],
    out_dtype: Any,
    sizes: Fp8Tiles,
    *,
    num_rows: int,
    rounded: bool = False,
    norm: NormCall | None = None,
    row: RowOperands | None = None,
) -> tuple[Float[Array, "T F"] | Splits, list[Float[Array, "1 D"]]]:
    """(x @ kernel^T) times the factors of its rows and columns, summed in float32; or what adds up to it.

    And if x is normed first, its sum, and the norm.

    Args:
        x, kernel: In fp8 (e4m3); of x's rows those past `num_rows` are any. A whole row is not in fp8 yet.
        x_scales: Of the rows, and any numbers up to the end of the last work tile; None of a whole row.
        sizes: Of the work tiles.
        rounded: Whether each split's sums are rounded to `out_dtype`, and leave as whole tiles.
        norm, row: If a whole row is added up and normed before it is rounded, what is done and what with.
    """
    (rows, depth), columns = x.shape, kernel.shape[1]
    product = _Product(
        sizes=sizes,
        rows=rows,
        own_rows=num_rows,
        depth=depth,
        columns=columns,
        out_dtype=jnp.dtype(out_dtype),
        rounded=rounded,
        norm=norm,
    )
    if product.in_splits and rounded:
        out_type = jax.ShapeDtypeStruct((sizes.splits, rows, columns), out_dtype)
    elif product.in_splits:
        out_type = jax.ShapeDtypeStruct((sizes.splits, product.split_rows, columns), jnp.float32)
    else:
        out_type = jax.ShapeDtypeStruct((rows, columns), out_dtype)
    cluster: dict[str, Any] = {}
    if sizes.cluster > 1:
        cluster = {"cluster": (sizes.cluster,), "cluster_names": ("cluster",)}
    leaves, tree = jax.tree.flatten(_Operands(x, x_scales, kernel, scales, layer_index.reshape(1), row))
    run = launch.kernel(
        functools.partial(product.body, tree),
        out_type=[out_type] if norm is None else [out_type, *[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2],
        grid=(product.num_blocks,),
        grid_names=("block",),
        num_threads=sizes.consumers + 1,
        reduction_bytes=0,
        kernel_name="fp8_matmul",
        **cluster,
    )
    out, *of_row = run(*leaves)
    if product.in_splits:
        return Splits(parts=out, num_rows=num_rows, dtype=product.out_dtype), of_row
    return out[:num_rows], of_row


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    sizes: Fp8Tiles
    rows: int  # of x
    own_rows: int  # of them
    depth: int
    columns: int
    out_dtype: Any
    rounded: bool = False
    norm: NormCall | None = None

    @property
    def whole(self) -> bool:
        """Whether the row is in shared memory all the time."""
        return self.sizes.whole_row

    @property
    def in_splits(self) -> bool:
        """Whether sums are stored, which another adds up and scales."""
        return self.sizes.splits > 1 or self.out_dtype == jnp.float32

    @property
    def stages_out(self) -> bool:
        """Whether what leaves is brought to shared memory first."""
        return self.rounded or not self.in_splits

    @property
    def split_rows(self) -> int:
        """Of the sums; the warps of a reader share them out evenly."""
        return pl.cdiv(self.own_rows, tiles.WARPS) * tiles.WARPS

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.rows, self.sizes.block_rows)

    @property
    def column_blocks(self) -> int:
        """Blocks of columns of a cluster's blocks together."""
        return pl.cdiv(self.columns, self.sizes.block_columns * self.sizes.cluster)

    @property
    def num_tiles(self) -> int:
        return self.row_blocks * self.column_blocks * self.sizes.splits

    @property
    def num_blocks(self) -> int:
        """Clusters, where there are some."""
        return min(self.num_tiles, tiles.num_sms() // self.sizes.cluster)

    def body(self, tree: Any, *refs: Any) -> None:
        sizes = self.sizes
        operands, (out, *of_row) = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves :]
        rows = (sizes.stages, sizes.block_rows, BLOCK_DEPTH) if not self.whole else (TILED_ROWS, self.depth)
        staging = (sizes.consumers, 2, sizes.staged_rows, WGMMA_ROWS)
        stages: dict[str, Any] = {"num_barriers": sizes.stages}
        if sizes.cluster > 1:
            empty = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=sizes.consumers, **stages)
        else:
            empty = plgpu.Barrier(num_arrivals=sizes.consumers, **stages)
        scratch = _Scratch(
            kernel=tiles.tile((sizes.stages, sizes.block_columns, BLOCK_DEPTH), operands.kernel.dtype),
            x=tiles.tile(rows, operands.kernel.dtype, BLOCK_DEPTH),
            out=tiles.tile(staging, self.out_dtype, WIDTHS if sizes.overlap else None) if self.stages_out else None,
            full=plgpu.Barrier(num_arrivals=1 if self.whole else 2, **stages),
            empty=empty,
        )
        if self.whole:
            place = meeting(self.depth, sizes.consumers)
            scratch = scratch._replace(meeting=place, factor=plgpu.SMEM((1,), jnp.float32))

        def warpgroup(scratch: _Scratch) -> None:
            number, several = lax.axis_index("warpgroup"), sizes.consumers > 1

            @pl.when(number == sizes.consumers)
            def produce():
                if several:
                    plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
                self._produce(operands, scratch)

            @pl.when(number < sizes.consumers)
            def consume():
                if several:
                    plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
                factor = None if not self.whole else self._round(operands, tuple(of_row), scratch, number)
                self._consume(operands, out, scratch, number, factor)

        pl.run_scoped(warpgroup, scratch, collective_axes="warpgroup")

    def _for_each_tile(self, visit: Callable[[ProductTile, Any], None]) -> Any:
        """Calls `visit(work tile, steps before it)` for each of the block's; the steps in all."""
        own, steps, splits = lax.axis_index("block"), pl.cdiv(self.depth, BLOCK_DEPTH), self.sizes.splits

        def visit_tile(i, done):
            split, rest = _divided(own + i * self.num_blocks, self.row_blocks * self.column_blocks)
            neighbours, rest = _divided(rest, _NEIGHBOURS * self.column_blocks)
            before = neighbours * _NEIGHBOURS
            block, row = _divided(rest, jnp.minimum(_NEIGHBOURS, self.row_blocks - before))
            if self.sizes.cluster > 1:
                block = block * self.sizes.cluster + lax.axis_index("cluster")
            first, end = (lax.div((split + side) * steps, splits) for side in range(2))
            visit(ProductTile(before + row, block, split, first, end - first), done)
            return done + end - first

        tiles_here = lax.div(self.num_tiles - own + self.num_blocks - 1, self.num_blocks)
        return lax.fori_loop(0, tiles_here, visit_tile, jnp.int32(0))

    def _produce(self, operands: _Operands, scratch: _Scratch) -> None:
        sizes, layer = self.sizes, operands.layer[0]
        shared: dict[str, Any] = {"collective_axes": "cluster"} if sizes.cluster > 1 else {}

        def copy_tile(tile: ProductTile, done):
            columns = pl.ds(tile.column_block * sizes.block_columns, sizes.block_columns)
            rows = pl.ds(tile.row_block * sizes.block_rows, sizes.block_rows)

            @pl.loop(0, tile.steps)
            def copy_step(k):
                stage = lax.rem(done + k, sizes.stages)
                pl.when(done + k >= sizes.stages)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                depth = pl.ds((tile.first + k) * BLOCK_DEPTH, BLOCK_DEPTH)
                full = scratch.full.at[stage]
                plgpu.copy_gmem_to_smem(operands.kernel.at[layer, columns, depth], scratch.kernel.at[stage], full)
                if not self.whole:
                    plgpu.copy_gmem_to_smem(operands.x.at[rows, depth], scratch.x.at[stage], full, **shared)

        steps = self._for_each_tile(copy_tile)
        wait_for_last(scratch.empty, steps, sizes.stages)

    def _round(self, operands: _Operands, outs: tuple[Any, ...], scratch: _Scratch, number: Any) -> Any:
        """The factor of a whole row, once all of it is in shared memory."""
        place = scratch.meeting
        assert place is not None

        def make_share():
            factor = rounded_share(operands.x, operands.row, outs, self.norm, place, scratch.x, number)

            @pl.when(number == 0)
            def tell():
                scratch.factor[0] = factor

        place.hold(number, make_share)
        return scratch.factor[0]

    def _consume(self, operands: _Operands, out: Any, scratch: _Scratch, number: Any, factor: Any) -> None:
        stages = self.sizes.stages
        own_begin = number * WGMMA_ROWS
        if self.sizes.overlap:  # the last consumer begins in the strip of the one before
            own_begin = jnp.minimum(own_begin, self.sizes.block_columns - WGMMA_ROWS)
        own_begin = pl.multiple_of(own_begin, WIDTHS if self.sizes.overlap else WGMMA_ROWS)
        own = pl.ds(own_begin, WGMMA_ROWS)

        def multiply_tile(tile: ProductTile, done):
            begin = tile.column_block * self.sizes.block_columns + own_begin
            # Before they are waited for, where registers allow it.
            early = self.sizes.block_rows <= _EARLY_ROWS
            factors = self._factors(operands, tile, begin, factor) if early else None

            def multiply(acc, stage, k):
                depth = pl.ds(pl.multiple_of((tile.first + k) * BLOCK_DEPTH, BLOCK_DEPTH), BLOCK_DEPTH)
                x = scratch.x.at[:, depth] if self.whole else scratch.x.at[stage]
                plgpu.wgmma(acc, scratch.kernel.at[stage, own], x.transpose((1, 0)))

            shape = WGMMA_ROWS, self.sizes.block_rows
            result = summed_over_stages(multiply, scratch, done, tile.steps, stages=stages, shape=shape)
            of_rows, of_columns = factors or self._factors(operands, tile, begin, factor)
            result *= of_rows if factor is not None else lax.broadcast_in_dim(of_rows, result.shape, [1])
            result *= lax.broadcast_in_dim(of_columns, result.shape, [0])
            if not self.stages_out:
                self._store_sums(self._own_rows(result, tile, self.split_rows), out, tile, begin)
                return
            target, first_row = out, tile.row_block * self.sizes.block_rows
            if self.in_splits:
                target, result = out.at[tile.split], self._own_rows(result, tile, self.rows)
            shared = {"overlap": self.sizes.overlap, "is_last": number == self.sizes.consumers - 1}
            copy_turned(scratch.out.at[number], target, first_row, begin, result, **shared)

        self._for_each_tile(multiply_tile)
        if self.stages_out:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _factors(self, operands: _Operands, tile: ProductTile, begin: Any, factor: Any) -> tuple[Any, Any]:
        """Of a tile's rows and columns. Columns past the last are not stored: their factor is any.

        Args:
            factor: Of a whole row.
        """
        of_tile = pl.ds(tile.row_block * self.sizes.block_rows, self.sizes.block_rows)
        own, rows = pl.ds(jnp.minimum(begin, self.columns - WGMMA_ROWS), WGMMA_ROWS), plgpu.Layout.WGMMA.reduce(0)
        return (
            plgpu.load(operands.x_scales.at[of_tile], layout=rows, optimized=False) if factor is None else factor,
            plgpu.load(
                operands.scales.at[operands.layer[0], own], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
            ),
        )

    def _own_rows(self, result: Any, tile: ProductTile, rows: int) -> Any:
        """A tile's sums, 0 in those of so many rows that x has none of its own for."""
        if rows == self.own_rows and not self.whole:  # whose tile's other rows are any
            return result
        first = tile.row_block * self.sizes.block_rows
        row = plgpu.broadcasted_iota(jnp.int32, result.shape, 1, layout=plgpu.Layout.WGMMA) + first
        return jnp.where(row < self.own_rows, result, 0.0)

    def _store_sums(self, result: Any, out: Any, tile: ProductTile, begin: Any) -> None:
        def store():
            store_turned(out, tile.split, tile.row_block * self.sizes.block_rows, begin, result)

        if self.columns % (self.sizes.block_columns * self.sizes.cluster):
            pl.when(begin < self.columns)(store)  # the last blocks of a cluster may have no columns
        else:
            store()


def _divided(number: Any, by: Any) -> tuple[Any, Any]:
    return lax.div(number, by), lax.rem(number, by)
