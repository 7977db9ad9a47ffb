"""What one token's mixture begins with where it makes its own logits: a product, a sum, its norm, the router's product.

product   a unit is 64 columns and a share of the depth; a block has one at most, and its weights fit the stages
sum       each block adds up and norms the whole row for itself
router    likewise units; their weights are in shared memory by then
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.call import NormCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.arrivals import Sums, never_zero
from jattn_kernels.mosaic.sm90.common.one_row import norm_of_sum
from jattn_kernels.mosaic.sm90.common.product_tiles import summed_over_stages
from jattn_kernels.mosaic.sm90.common.row_pieces import Piece
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_stages import (
    DEPTH,
    STAGES,
    Scratch,
    copy_stage,
    store_row,
)


@dataclasses.dataclass(frozen=True)
class SplitProduct:
    """A product of one row, a unit a block: of few enough columns that each block of them has a block of the grid.

    Attributes:
        most_splits: Of the depth, at most.
    """

    depth: int
    columns: int
    most_splits: int

    @property
    def column_blocks(self) -> int:
        return self.columns // WGMMA_ROWS

    @property
    def steps(self) -> int:
        """Of the whole depth."""
        return self.depth // DEPTH

    @property
    def splits(self) -> int:
        """Shares of the depth."""
        return min(self.steps, self.most_splits, tiles.num_sms() // self.column_blocks)

    @property
    def units(self) -> int:
        return self.column_blocks * self.splits

    @property
    def most_steps(self) -> int:
        """Of a share."""
        return pl.cdiv(self.steps, self.splits)

    def visit(self, number: Any, unit: Callable[[Any, Any, Any, Any], Any], done: Any) -> Any:
        """`unit(split, block of columns, first step, steps)` of a block that has one; what is done then."""
        split, block = lax.div(number, self.column_blocks), lax.rem(number, self.column_blocks)
        first, end = (lax.div((split + side) * self.steps, self.splits) for side in range(2))
        is_unit = number < self.units
        pl.when(is_unit)(lambda: unit(split, block, first, end - first))
        return done + jnp.where(is_unit, end - first, 0)


@dataclasses.dataclass(frozen=True)
class RouterPhases:
    """The phases before the choice.

    Attributes:
        norm: Its facts.
        depth: Of the product.
        num_experts: The router's columns.
        per_token: Parts that what is left comes in; in the second row of each there is room for a part of a product.
    """

    norm: NormCall
    depth: int
    num_experts: int
    per_token: int

    @property
    def product(self) -> SplitProduct:
        """Two parts are for logits, and the count of hidden units."""
        return SplitProduct(self.depth, self.norm.columns, self.per_token - 2)

    @property
    def router(self) -> SplitProduct:
        return SplitProduct(self.norm.columns, self.num_experts, self.norm.columns // self.num_experts)

    def room(self, left: Any) -> tuple[Sums, Sums, Any]:
        """In what is left: for the product, for logits, and for a count."""
        _, rows, columns = left.shape
        products = Sums(left, columns, rows * columns, self.product.splits)
        logits = Sums(left, (self.product.splits * rows + 1) * columns, self.num_experts, self.router.splits)
        return products, logits, left.at[self.per_token - 1, 1]

    @property
    def row(self) -> int:
        """Numbers of the longest row."""
        return max(self.norm.columns, self.product.most_steps * DEPTH)

    def produce_product(self, operands: Any, scratch: Scratch, done: Any) -> Any:
        """Asks for the weights of the block's unit; the stages asked for then, as of all that produce."""
        weights = operands.sum.output.at[operands.sum.output_layer[0]]
        return self._produce(self.product, lax.axis_index("block"), weights, scratch, done)

    def produce_router(self, operands: Any, scratch: Scratch, done: Any) -> Any:
        weights = operands.sum.router.at[operands.layer[0]]
        return self._produce(self.router, _from_last(), weights, scratch, done)

    def _produce(self, product: SplitProduct, number: Any, weights: Any, scratch: Scratch, done: Any) -> Any:
        def copy_unit(split, block, first, steps):
            del split
            columns = pl.ds(block * WGMMA_ROWS, WGMMA_ROWS)

            @pl.loop(0, steps)
            def copy_step(k):
                copy_stage(weights.at[pl.ds((first + k) * DEPTH, DEPTH), columns], scratch, done + k)

        return product.visit(number, copy_unit, done)

    def consume_product(self, operands: Any, products: Sums, scratch: Scratch, done: Any) -> Any:
        """Stores the unit's sums; the stages that have been used then, as of all that consume."""
        product, width = self.product, self.product.most_steps * DEPTH

        def multiply_unit(split, block, first, steps):
            source = operands.sum.attended.at[pl.ds(0, TILED_ROWS), pl.ds(first * DEPTH, width)]
            plgpu.copy_gmem_to_smem(source, scratch.x.at[:, pl.ds(0, width)], scratch.attended_full)
            plgpu.barrier_wait(scratch.attended_full)
            result = _multiplied(scratch, 0, done, steps)
            _store(products, split, block, result)

        return product.visit(lax.axis_index("block"), multiply_unit, done)

    def sum(self, operands: Any, products: Sums, total: Any, scratch: Scratch) -> None:
        """The norm of the sum in shared memory; the first block stores the sum, if there is a place for it."""
        norm, given = self.norm, operands.sum

        def of_product(piece: Piece) -> jax.Array:
            return products.added_up(piece.numbers, piece.layout)

        norm_of_sum(
            given.x,
            given.scale.at[given.scale_layer[0]],
            [given.left],
            scratch.x.at[:, pl.ds(0, norm.columns)],
            () if total is None else (total,),
            eps=norm.eps,
            offset=norm.offset,
            last=of_product,
        )

    def consume_router(self, logits: Sums, scratch: Scratch, done: Any) -> Any:
        def multiply_unit(split, block, first, steps):
            _store(logits, split, block, _multiplied(scratch, first, done, steps))

        return self.router.visit(_from_last(), multiply_unit, done)


def _store(sums: Sums, split: Any, block: Any, result: jax.Array) -> None:
    """A unit's: the first row of what a block of columns has."""
    store_row(sums.ref, sums.begin + split * sums.stride + block * WGMMA_ROWS, never_zero(result), 0)


def _multiplied(scratch: Scratch, first: Any, done: Any, steps: Any) -> Any:
    """A unit's product with the row from its `first` step on."""

    def multiply(acc, stage, k):
        x = scratch.x.at[:, pl.ds((first + k) * DEPTH, DEPTH)]
        plgpu.wgmma(acc, scratch.kernel.at[stage].transpose((1, 0)), x.transpose((1, 0)))

    return summed_over_stages(multiply, scratch, done, steps, stages=STAGES, shape=(WGMMA_ROWS, TILED_ROWS))


def _from_last() -> Any:
    """The block's number from the last one on: those have no unit of the product before."""
    return tiles.num_sms() - 1 - lax.axis_index("block")
