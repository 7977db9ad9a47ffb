"""What may follow one token's mixture in the same kernel: the next layer's norm, and its product.

sum       each block adds up what all experts returned, and the sum of before that it has kept, and norms it
product   units, whose weights are in shared memory by then
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jattn_kernels.call import NormCall
from jattn_kernels.mosaic.sm90.common.arrivals import Sums
from jattn_kernels.mosaic.sm90.common.one_row import loaded_row, norm_of_sum
from jattn_kernels.mosaic.sm90.common.row_pieces import Piece
from jattn_kernels.mosaic.sm90.common.tiles import WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_split import SplitProduct
from jattn_kernels.mosaic.sm90.experts.one_token_stages import KEPT, Ring, Scratch, store_row, store_zeros


@dataclasses.dataclass(frozen=True)
class NextPhase:
    """The phase after the experts.

    Attributes:
        norm: Its facts.
        product: Of what is normed.
    """

    norm: NormCall
    product: SplitProduct

    def produce_first(self, operands: Any, scratch: Scratch, ring: Ring) -> None:
        """Asks for its first stages, which are behind the ring."""
        weights = operands.next.kernel.at[operands.next.layer[0]]

        def copy(weights: Any, number: Any) -> None:
            pl.when(number < KEPT)(lambda: ring.copy_behind(weights, scratch, number))

        self.product.produce(lax.axis_index("block"), weights, copy, jnp.int32(0))

    def produce(self, operands: Any, scratch: Scratch, ring: Ring, done: Any) -> tuple[Any, Any]:
        """Asks for the others; the ring's stages asked for then, and how many there are behind it."""
        weights = operands.next.kernel.at[operands.next.layer[0]]

        def copy(weights: Any, number: Any) -> None:
            @pl.when(number >= KEPT)
            def copy_in_turn() -> None:
                ring.copy(weights, scratch, done + number - KEPT)

        steps = self.product.produce(lax.axis_index("block"), weights, copy, jnp.int32(0))
        return done + jnp.maximum(steps - KEPT, 0), jnp.minimum(steps, KEPT)

    def clear(self, out: Any) -> None:
        """Stores zeros below the first row of the block's units."""
        columns = self.product.columns

        def clear_unit(split: Any, block: Any) -> None:
            for row in range(1, WARPS):
                store_zeros(out, (split * WARPS + row) * columns + block * WGMMA_ROWS)

        self.product.for_each(lax.axis_index("block"), clear_unit)

    def scale(self, operands: Any) -> list[jax.Array]:
        """Of the norm: what `consume` needs, and need not wait for."""
        given = operands.next
        return loaded_row(given.scale.at[given.scale_layer[0]])

    def consume(
        self, operands: Any, scale: list[jax.Array], returned: Sums, out: Any, scratch: Scratch, ring: Ring, done: Any
    ) -> None:
        """Stores the product's splits.

        Args:
            returned: By the experts, times their weights.
            out: Rows past the first are another's, who clears them.
        """
        norm, columns = self.norm, self.product.columns

        def of_experts(piece: Piece) -> jax.Array:
            return returned.added_up(piece.numbers, piece.layout)

        norm_of_sum(
            scratch.total if operands.total is None else operands.total,
            scale,
            [],
            scratch.x.at[:, pl.ds(0, norm.columns)],
            (),
            eps=norm.eps,
            offset=norm.offset,
            last=of_experts,
        )

        def store(split: Any, block: Any, result: jax.Array) -> None:
            store_row(out, split * WARPS * columns + block * WGMMA_ROWS, result, 0)

        def stage_of(number: Any) -> Any:
            in_ring = lax.rem(done + jnp.maximum(number - KEPT, 0), ring.stages)
            return jnp.where(number < KEPT, ring.stages + number, in_ring)

        self.product.consume(lax.axis_index("block"), scratch, store, jnp.int32(0), stage_of=stage_of)
