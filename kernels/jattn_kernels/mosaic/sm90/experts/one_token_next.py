"""What may follow one token's mixture in the same kernel: the next layer's norm, and its product.

sum       each block adds up what all experts returned, and the sum of before that it has kept, and norms it
product   units, whose first weights are in shared memory by then
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jattn_kernels.call import NormCall
from jattn_kernels.mosaic.sm90.common.arrivals import Sums
from jattn_kernels.mosaic.sm90.common.one_row import norm_of_sum
from jattn_kernels.mosaic.sm90.common.row_norm import clear_last
from jattn_kernels.mosaic.sm90.common.row_pieces import Piece
from jattn_kernels.mosaic.sm90.common.tiles import WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_split import Bias, SplitProduct
from jattn_kernels.mosaic.sm90.experts.one_token_stages import DEPTH, Ring, Scratch, store_row, store_zeros


@dataclasses.dataclass(frozen=True)
class NextPhase:
    """The phase after the experts.

    Attributes:
        norm: Its facts.
        product: Of what is normed.
        kept: Stages for its first weights, which are asked for while the experts are not known.
    """

    norm: NormCall
    product: SplitProduct
    kept: int

    def produce_first(self, operands: Any, scratch: Scratch, ring: Ring) -> None:
        """Asks for its first stages, which are behind the ring."""
        weights = operands.next.kernel.at[operands.next.layer[0]]

        def copy(weights: Any, number: Any) -> None:
            pl.when(number < self.kept)(lambda: ring.copy_behind(weights, scratch, number))

        self.product.produce(lax.axis_index("block"), weights, copy, jnp.int32(0))

    def produce(self, operands: Any, scratch: Scratch, ring: Ring, done: Any) -> tuple[Any, Any]:
        """Asks for the others; the ring's stages asked for then, and how many there are behind it."""
        weights = operands.next.kernel.at[operands.next.layer[0]]

        def copy(weights: Any, number: Any) -> None:
            @pl.when(number >= self.kept)
            def copy_in_turn() -> None:
                ring.copy(weights, scratch, done + number - self.kept)

        steps = self.product.produce(lax.axis_index("block"), weights, copy, jnp.int32(0))
        return done + jnp.maximum(steps - self.kept, 0), jnp.minimum(steps, self.kept)

    def consume(self, operands: Any, returned: Sums, out: Any, scratch: Scratch, ring: Ring, done: Any) -> None:
        """Stores the product's splits.

        Args:
            returned: By the experts, times their weights.
            out: Rows past the first become 0.
        """
        given, norm, columns = operands.next, self.norm, self.product.columns

        if norm.columns % DEPTH:
            clear_last(scratch.x.at[:, pl.ds(0, pl.cdiv(norm.columns, DEPTH) * DEPTH)])

        def of_experts(piece: Piece) -> jax.Array:
            return returned.added_up(piece.numbers, piece.layout)

        norm_of_sum(
            scratch.total if operands.total is None else operands.total,
            given.scale.at[given.scale_layer[0]],
            [],
            scratch.x.at[:, pl.ds(0, norm.columns)],
            (),
            eps=norm.eps,
            offset=norm.offset,
            last=of_experts,
        )

        def store(split: Any, block: Any, result: jax.Array) -> None:
            place = split * WARPS * columns + block * WGMMA_ROWS
            store_row(out, place, result, 0)
            for row in range(1, WARPS):
                store_zeros(out, place + row * columns)

        def stage_of(number: Any) -> Any:
            in_ring = lax.rem(done + jnp.maximum(number - self.kept, 0), ring.stages)
            return jnp.where(number < self.kept, ring.stages + number, in_ring)

        bias = None if given.bias is None else Bias(given.bias, given.layer[0], columns)
        own = lax.axis_index("block")
        self.product.consume(own, scratch, store, jnp.int32(0), stage_of=stage_of, bias=bias)
