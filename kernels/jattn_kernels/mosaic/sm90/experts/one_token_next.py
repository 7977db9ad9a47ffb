"""What may follow one token's mixture in the same kernel: the next layer's norm, and its product.

sum       each block adds up what all experts returned, and the sum of before that it has kept, and norms it
product   units, whose weights are in shared memory by then
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
from jax import lax

from jattn_kernels.call import NormCall
from jattn_kernels.mosaic.sm90.common.arrivals import Sums
from jattn_kernels.mosaic.sm90.common.one_row import norm_of_sum
from jattn_kernels.mosaic.sm90.common.row_pieces import Piece
from jattn_kernels.mosaic.sm90.common.tiles import WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_split import SplitProduct
from jattn_kernels.mosaic.sm90.experts.one_token_stages import Scratch, store_row, store_zeros


@dataclasses.dataclass(frozen=True)
class NextPhase:
    """The phase after the experts.

    Attributes:
        norm: Its facts.
        product: Of what is normed.
    """

    norm: NormCall
    product: SplitProduct

    def produce(self, operands: Any, scratch: Scratch, done: Any) -> Any:
        weights = operands.next.kernel.at[operands.next.layer[0]]
        return self.product.produce(lax.axis_index("block"), weights, scratch, done)

    def consume(self, operands: Any, returned: Sums, out: Any, scratch: Scratch, done: Any) -> None:
        """Stores the product's splits.

        Args:
            returned: By the experts, times their weights.
            out: Rows past the first become 0.
        """
        given, norm, columns = operands.next, self.norm, self.product.columns

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

        self.product.consume(lax.axis_index("block"), scratch, store, done)
