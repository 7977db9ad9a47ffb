"""What one token's mixture begins with where it makes its own logits: a product, a sum, its norm, the router's product.

product   a unit is 64 columns and a share of the depth; a block has one at most
sum       each block adds up and norms the whole row for itself
router    likewise units; their weights are in shared memory by then, or on their way
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from jattn_kernels.call import NormCall
from jattn_kernels.mosaic.sm90.common.arrivals import Sums, never_zero
from jattn_kernels.mosaic.sm90.common.one_row import norm_of_sum
from jattn_kernels.mosaic.sm90.common.row_norm import clear_last
from jattn_kernels.mosaic.sm90.common.row_pieces import Piece
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_attention import AttentionPhase, SplitRoom
from jattn_kernels.mosaic.sm90.experts.one_token_latents import LatentPhase
from jattn_kernels.mosaic.sm90.experts.one_token_merge import merge_into, merged_width
from jattn_kernels.mosaic.sm90.experts.one_token_split import Bias, SplitProduct, from_last
from jattn_kernels.mosaic.sm90.experts.one_token_stages import DEPTH, Ring, Scratch, left_parts, store_row
from jattn_kernels.mosaic.sm90.experts.one_token_values import ValuePhase


@dataclasses.dataclass(frozen=True)
class RouterPhases:
    """The phases before the choice.

    Attributes:
        norm: Its facts.
        depth: Of the product.
        num_experts: The router's columns.
        left_parts: Parts that what is left comes in; in the second row of each there is room for a part of a product.
        attention: What the product's rows are made of; None where they are given.
        values: Of latent rows, what comes between.
    """

    norm: NormCall
    depth: int
    num_experts: int
    left_parts: int
    attention: AttentionPhase | LatentPhase | None = None
    values: ValuePhase | None = None

    @property
    def product(self) -> SplitProduct:
        """One part is for logits."""
        return SplitProduct.of_a_unit_each(self.depth, self.norm.columns, self.left_parts - 1)

    @property
    def router(self) -> SplitProduct:
        """Its columns are whole blocks: those past the last expert are nobody's."""
        columns, own = self.norm.columns, pl.cdiv(self.num_experts, WGMMA_ROWS) * WGMMA_ROWS
        return SplitProduct.of_a_unit_each(columns, own, columns // own)

    @property
    def product_row(self) -> int:
        """Numbers of a row that is normed, in whole steps of the products of it."""
        return pl.cdiv(self.norm.columns, DEPTH) * DEPTH

    @property
    def row(self) -> int:
        """Numbers of the longest row."""
        share, attention = self.product.most_steps, self.attention
        of_queries = attention.row if isinstance(attention, LatentPhase) else 0
        return max(self.product_row, of_queries, share * DEPTH if attention is None else merged_width(share))

    def room(self, left: Any) -> tuple[Sums, Sums]:
        """In what is left: for the product, and for logits."""
        _, rows, columns = left.shape
        products = Sums(left, columns, rows * columns, self.product.splits)
        place = (self.product.splits * rows + 1) * columns
        logits = Sums(left, place, self.router.columns, self.router.splits)
        return products, logits

    def produce_product(self, operands: Any, scratch: Scratch, done: Any) -> Any:
        weights = operands.router.output.at[operands.router.output_layer[0]]
        return self.product.produce(lax.axis_index("block"), weights, lambda *stage: _copy(scratch, *stage), done)

    def produce_router(self, operands: Any, scratch: Scratch, done: Any) -> Any:
        weights = operands.router.kernel.at[operands.layer[0]]
        return self.router.produce(from_last(), weights, lambda *stage: _copy(scratch, *stage), done)

    def consume_product(
        self,
        operands: Any,
        attended: SplitRoom | None,
        values: Sums | None,
        products: Sums,
        scratch: Scratch,
        done: Any,
    ) -> Any:
        width = self.product.most_steps * DEPTH

        def bring(first: Any) -> None:
            if self.values is not None and values is not None:
                heads = self.product.most_steps
                self.values.bring(scratch.x.at[:, pl.ds(0, merged_width(heads))], values, first, heads)
                return
            if isinstance(self.attention, AttentionPhase) and attended is not None:
                heads = self.product.most_steps
                target = scratch.x.at[:, pl.ds(0, merged_width(heads))]
                merge_into(target, self.attention, operands.router.attention, attended, first, heads)
                return
            source = operands.router.attended.at[pl.ds(0, TILED_ROWS), pl.ds(first * DEPTH, width)]
            plgpu.copy_gmem_to_smem(source, scratch.x.at[:, pl.ds(0, width)], scratch.attended_full)
            plgpu.barrier_wait(scratch.attended_full)

        own = lax.axis_index("block")
        given = operands.router
        bias = None if given.output_bias is None else Bias(given.output_bias, given.output_layer[0], self.norm.columns)
        return self.product.consume(own, scratch, lambda *unit: _store(products, *unit), done, bring=bring, bias=bias)

    def sum(self, operands: Any, products: Sums, total: Any, scratch: Scratch) -> list[jax.Array]:
        """The norm of the sum in shared memory, the sum beside it; the first block stores it where there is a place.

        Returns:
            The norm, in pieces.
        """
        norm, given = self.norm, operands.router.norm
        if norm.columns % DEPTH:  # what is past the row's end; the row's own follow
            clear_last(scratch.x.at[:, pl.ds(0, self.product_row)])

        def of_product(piece: Piece) -> jax.Array:
            return products.added_up(piece.numbers, piece.layout)

        return norm_of_sum(
            given.x,
            given.scale.at[given.layer_index[0]],
            [left_parts(operands.router)],
            scratch.x.at[:, pl.ds(0, norm.columns)],
            () if total is None else (total,),
            eps=norm.eps,
            offset=norm.offset,
            last=of_product,
            kept=scratch.total,
        )

    def consume_router(self, operands: Any, logits: Sums, scratch: Scratch, done: Any) -> Any:
        given = operands.router.bias
        bias = None if given is None else Bias(given, operands.layer[0], self.num_experts)
        return self.router.consume(from_last(), scratch, lambda *unit: _store(logits, *unit), done, bias=bias)


def _copy(scratch: Scratch, weights: Any, number: Any) -> None:
    Ring(scratch.kernel.shape[0]).copy(weights, scratch, number)


def _store(sums: Sums, split: Any, block: Any, result: jax.Array) -> None:
    """A unit's: the first row of what a block of columns has."""
    store_row(sums.ref, sums.begin + split * sums.stride + block * WGMMA_ROWS, never_zero(result), 0)
