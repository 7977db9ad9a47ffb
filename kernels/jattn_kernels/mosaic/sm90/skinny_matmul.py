"""A product of few rows on Hopper, as fast as its weights are read.

grid (blocks)            an SM each; takes every blocks-th work tile: some columns, a share of the depth
  consumer warpgroup     acc^T += w^T x^T: columns of the weights on wgmma's 64 rows, the rows of x on its columns
  producer warpgroup     TMA: weights and rows of x, stages ahead, across work tiles
  full                   producer -> consumer: a stage has arrived
  empty                  consumer -> producer: the stage may be overwritten

Rows that are to be normed are brought whole, at once, and normed while the weights come: the norm is not waited for.
One row may be a sum: each block adds it up, and the first one stores it.

The depth is split so that all SMs have as much to read (split-K). Each split's sums stand by themselves, in float32:
whoever reads them next adds them up, always in the same order. A bias is in the first split's.

Rows and weights past the last input are 0 in shared memory, and columns past the last one are not stored.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.call import MatmulCall, NormCall
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.indexed import gather, scatter
from jattn_kernels.mosaic.sm90.common.one_row import norm_of_sum
from jattn_kernels.mosaic.sm90.common.product_tiles import summed_over_stages
from jattn_kernels.mosaic.sm90.common.row_norm import clear_last, norm_in_place
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.operands import MatmulOperands
from jattn_kernels.splits import Splits, added

MOST_ROWS = 8  # what a wgmma has at least
# Numbers of a layer's weights from which on cuBLAS is as fast: on an H200 [2048, 5120] and [4096, 2048] take 12.5 us
# here and 15.9 there, each of [4096, 4096] and the larger ones the same, and the sum of the splits comes on top.
MOST_WEIGHTS = 15 * 2**20
MOST_NORMED = 4096  # numbers of a row that is normed: so many of all rows and the weights' stages fit beside each other
_ITEM_BYTES = 2
_DEPTH = 128  # of a stage: a copy of 16 KB
_HALF_DEPTH = _DEPTH // 2
_STAGES = 11
_SHARED_BYTES = 220 * 1024  # of rows that are normed, their scale, and the stages beside them
_MOST_SPLITS = 16
_SPLITS_OF_STEP = 10  # that a reader adds up in the time of a step, as reckoned


class _Scratch(NamedTuple):
    kernel: Any  # (stages, 128, 64)
    x: Any  # (stages, 8, 128); (8, depth) if it is normed
    full: Any
    empty: Any
    scale: Any = None  # (tiles of the depth, 128), or twice as many of 64
    rows_full: Any = None


class _Operands(NamedTuple):
    x: Any
    kernel: Any
    layer: Any
    scale: Any = None  # (layers, tiles of the depth, 128), or twice as many of 64 where that is no multiple of 128
    scale_layer: Any = None
    bias: Any = None  # (layers * columns,)
    additions: tuple[Any, ...] = ()  # (splits, rows, depth) each; the scale is then (layers, depth)


def adds_up(norm: NormCall) -> bool:
    """Whether what is added up is normed in the product."""
    return norm.num_rows == 1 and norm.columns % _HALF_DEPTH == 0 and norm.columns >= LEAST


def matmul(call: MatmulCall, operands: MatmulOperands) -> Any:
    """x @ kernel; XLA adds up the splits, beside whatever it does with them next, unless they are asked for.

    Of rows that are added up first: that, the rows' sum, and its norm.
    """
    whole = pl.cdiv(call.num_rows, tiles.WARPS) * tiles.WARPS  # rows that the warps of a reader share out evenly
    product = _Product(
        rows=whole if call.in_splits else call.num_rows,
        own_rows=call.num_rows,
        depth=call.depth,
        columns=call.columns,
        splits=num_splits(call.depth, call.columns),
        norm=call.norm,
    )
    given = _Operands(operands.x, operands.kernel, operands.layer_index.reshape(1))
    if operands.norm is not None:
        stack = operands.norm.scale
        additions = tuple(addition.parts for addition in operands.norm.additions)
        width = _HALF_DEPTH if call.depth % _DEPTH else _DEPTH
        scale = stack if additions else stack.reshape(len(stack), -1, width)
        layer = operands.norm.layer_index.reshape(1)
        given = given._replace(scale=scale, scale_layer=layer, additions=additions)
    if operands.bias is not None:
        given = given._replace(bias=operands.bias.reshape(-1))
    leaves, tree = jax.tree.flatten(given)
    out = jax.ShapeDtypeStruct((product.splits, product.rows, product.columns), jnp.float32)
    row = jax.ShapeDtypeStruct(operands.x.shape, operands.x.dtype)
    run = launch.kernel(
        functools.partial(product.body, tree),
        out_type=[out, row, row] if product.of_sum else [out],
        grid=(product.num_blocks,),
        grid_names=("block",),
        num_threads=2,
        kernel_name="skinny_matmul",
    )
    sums, *of_rows = run(*leaves)
    splits = Splits(parts=sums, num_rows=call.num_rows, dtype=jnp.dtype(call.out_dtype))
    result = splits if call.in_splits else added(splits)
    return (result, *of_rows) if of_rows else result


def num_splits(depth: int, columns: int) -> int:
    """The splits of the depth that cost least: steps of an SM's longest share, and what each split adds to a reader."""
    sms, steps, blocks = tiles.num_sms(), pl.cdiv(depth, _DEPTH), pl.cdiv(columns, WGMMA_ROWS)

    def cost(splits: int) -> int:
        longest_share = pl.cdiv(blocks * splits, sms) * pl.cdiv(steps, splits)
        return _SPLITS_OF_STEP * longest_share + splits

    return min(range(1, min(steps, _MOST_SPLITS) + 1), key=cost)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    rows: int  # of the result; those past x's are 0
    own_rows: int  # of x
    depth: int
    columns: int
    splits: int
    norm: NormCall | None

    @property
    def of_sum(self) -> bool:
        """Whether rows are added up before their norm."""
        return self.norm is not None and self.norm.of_sum

    @property
    def whole_depth(self) -> int:
        """Inputs of whole steps."""
        return pl.cdiv(self.depth, _DEPTH) * _DEPTH

    @property
    def stages(self) -> int:
        rows_and_scale = 0 if self.norm is None else (MOST_ROWS + 1) * self.whole_depth * _ITEM_BYTES
        return min(_STAGES, (_SHARED_BYTES - rows_and_scale) // (_DEPTH * WGMMA_ROWS * _ITEM_BYTES))

    @property
    def column_blocks(self) -> int:
        """Blocks of columns."""
        return pl.cdiv(self.columns, WGMMA_ROWS)

    @property
    def num_blocks(self) -> int:
        return min(self.column_blocks * self.splits, tiles.num_sms())

    def body(self, tree: Any, *refs: Any) -> None:
        operands, (sums, *of_rows) = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves :]
        dtype, stages = operands.x.dtype, self.stages
        scratch = _Scratch(
            kernel=tiles.tile((stages, _DEPTH, WGMMA_ROWS), dtype),
            x=tiles.tile((stages, MOST_ROWS, _DEPTH) if self.norm is None else (MOST_ROWS, self.whole_depth), dtype),
            full=plgpu.Barrier(num_arrivals=2 if self.norm is None else 1, num_barriers=stages),
            empty=plgpu.Barrier(num_barriers=stages),
        )
        if self.norm is not None and not self.of_sum:
            width = _HALF_DEPTH if self.depth % _DEPTH else _DEPTH
            shape = self.whole_depth // width, width
            scratch = scratch._replace(scale=plgpu.SMEM(shape, dtype), rows_full=plgpu.Barrier(num_arrivals=2))

        def warpgroup(scratch: _Scratch) -> None:
            number = lax.axis_index("warpgroup")
            pl.when(number == 0)(functools.partial(self._consume, operands, sums, of_rows, scratch))
            pl.when(number == 1)(functools.partial(self._produce, operands, scratch))

        pl.run_scoped(warpgroup, scratch, collective_axes="warpgroup")

    def _for_each_tile(self, visit: Any) -> Any:
        """Calls `visit(split, block, first step, steps, steps before it)` for each work tile; the steps in all.

        Tiles of neighbouring columns are those of neighbours.
        """
        own, steps = lax.axis_index("block"), pl.cdiv(self.depth, _DEPTH)

        def visit_tile(i, done):
            number = own + i * self.num_blocks
            split, block = lax.div(number, self.column_blocks), lax.rem(number, self.column_blocks)
            first, end = (lax.div((split + side) * steps, self.splits) for side in range(2))
            visit(split, block, first, end - first, done)
            return done + end - first

        tiles_here = lax.div(self.column_blocks * self.splits - own + self.num_blocks - 1, self.num_blocks)
        return lax.fori_loop(0, tiles_here, visit_tile, jnp.int32(0))

    def _produce(self, operands: _Operands, scratch: _Scratch) -> None:
        number, stages = operands.layer[0], self.stages

        def copy_tile(split, block, first, steps, done):
            del split
            columns = pl.ds(block * WGMMA_ROWS, WGMMA_ROWS)

            @pl.loop(0, steps)
            def copy_step(k):
                stage = lax.rem(done + k, stages)
                pl.when(done + k >= stages)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                depth, full = pl.ds((first + k) * _DEPTH, _DEPTH), scratch.full.at[stage]
                plgpu.copy_gmem_to_smem(operands.kernel.at[number, depth, columns], scratch.kernel.at[stage], full)
                if self.norm is None:
                    plgpu.copy_gmem_to_smem(operands.x.at[pl.ds(0, MOST_ROWS), depth], scratch.x.at[stage], full)

        steps = self._for_each_tile(copy_tile)

        @pl.loop(jnp.maximum(steps, stages), steps + stages)
        def wait_for_the_last(step):
            plgpu.barrier_wait(scratch.empty.at[lax.rem(step, stages)])

    def _consume(self, operands: _Operands, sums: Any, of_rows: Any, scratch: _Scratch) -> None:
        stages = self.stages
        if self.norm is not None and self.of_sum:
            scale, parts = operands.scale.at[operands.scale_layer[0]], list(operands.additions)
            facts: dict[str, Any] = {"eps": self.norm.eps, "offset": self.norm.offset}
            if self.depth % _DEPTH:
                clear_last(scratch.x)  # what is past the row's end; the row's own follow
            norm_of_sum(operands.x, scale, parts, scratch.x, tuple(of_rows), **facts)
        elif self.norm is not None:
            rows = pl.ds(0, MOST_ROWS)
            source = operands.x.at[rows, pl.ds(0, self.whole_depth)] if self.depth % _DEPTH else operands.x.at[rows]
            plgpu.copy_gmem_to_smem(source, scratch.x, scratch.rows_full)
            scale = operands.scale.at[operands.scale_layer[0]]
            target = scratch.scale.at[pl.ds(0, scale.shape[0])] if self.depth % _DEPTH else scratch.scale
            plgpu.copy_gmem_to_smem(scale, target, scratch.rows_full)
            plgpu.barrier_wait(scratch.rows_full)
            norm_in_place(scratch.x, scratch.scale, columns=self.depth, eps=self.norm.eps, offset=self.norm.offset)

        def multiply_tile(split, block, first, steps, done):
            bias = None if operands.bias is None else self._bias(operands, split, block)

            def multiply(acc, stage, k):
                own = pl.ds((first + k) * _DEPTH, _DEPTH)
                x = scratch.x.at[stage] if self.norm is None else scratch.x.at[:, own]
                plgpu.wgmma(acc, scratch.kernel.at[stage].transpose((1, 0)), x.transpose((1, 0)))

            shape = WGMMA_ROWS, MOST_ROWS
            result = summed_over_stages(multiply, scratch, done, steps, stages=stages, shape=shape)
            self._store(sums, split, block, result if bias is None else result + bias)

        self._for_each_tile(multiply_tile)

    def _bias(self, operands: _Operands, split: Any, block: Any) -> jax.Array:
        """What the first split of a block of columns adds to x's rows; 0 of others."""
        layout, shape = plgpu.Layout.WGMMA, (WGMMA_ROWS, MOST_ROWS)
        column = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=layout.reduce(1)) + block * WGMMA_ROWS
        place = jnp.where(column < self.columns, column + operands.layer[0] * self.columns, -1)
        numbers = gather(operands.bias, place, layout.reduce(1)).astype(jnp.float32)
        numbers = lax.broadcast_in_dim(numbers * jnp.where(split == 0, 1.0, 0.0), shape, [0])
        row = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        return jnp.where(row < self.own_rows, numbers, 0.0)

    def _store(self, sums: Any, split: Any, block: Any, result: jax.Array) -> None:
        """A work tile's sums, turned: Pallas stores no such tile of float32 that way."""
        begin = block * WGMMA_ROWS
        if tiles.interpret_params() is not None:
            _store_columns(sums.at[split], begin, result.T[: self.rows])
            return
        layout = plgpu.Layout.WGMMA
        column, row = (plgpu.broadcasted_iota(jnp.int32, result.shape, axis, layout=layout) for axis in range(2))
        place = (split * self.rows + row) * self.columns + begin + column
        result = jnp.where(row < self.own_rows, result, 0.0)  # not -0.0, which is no 0 of an integer
        is_own = row < self.rows
        if self.columns % WGMMA_ROWS:
            is_own &= begin + column < self.columns
        scatter(sums, jnp.where(is_own, place, -1), result, layout)


def _store_columns(sums: Any, begin: Any, result: jax.Array) -> None:
    """Columns of a block from `begin` on, but for those past the last; 32 at a time."""
    half = WGMMA_ROWS // 2
    for part in range(2):

        @pl.when(begin + part * half < sums.shape[1])
        def store(part=part):
            sums[:, pl.ds(begin + part * half, half)] = result[:, part * half : (part + 1) * half]
