"""Hidden units of the experts that all tokens go to: blocks share the depth of their first product.

These experts are known before the router's are, while blocks wait for each other anyway. Of 64 of their hidden units a
block has a share of the depth, so that all blocks read weights by then; who reads the hidden units adds the shares up.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.arrivals import Sums, never_zero
from jattn_kernels.mosaic.sm90.common.one_row import store_in_tile
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST, Piece
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_split import SplitProduct
from jattn_kernels.mosaic.sm90.experts.one_token_stages import DEPTH, store_row

_HALVES = 2  # the gate's units and the other half's


@dataclasses.dataclass(frozen=True)
class SharedUnits:
    """Which block has which share, and how many there are.

    Attributes:
        experts: So many.
        units: Of each.
        depth: Of the product.
        shares: Of the depth.
    """

    experts: int
    units: int
    depth: int
    shares: int

    @classmethod
    def of_a_share_each(cls, experts: int, units: int, depth: int, most: int) -> "SharedUnits":
        """With as many shares as blocks can have one of, but no more than so many, and at least one."""
        blocks = experts * (units // WGMMA_ROWS)
        return cls(experts, units, depth, max(1, min(most, depth // DEPTH, tiles.num_sms() // max(1, blocks))))

    @staticmethod
    def most(rows: int) -> int:
        """Shares that so many rows have room for."""
        return rows // _HALVES

    @property
    def rows(self) -> int:
        """In which an expert's are left: whole ones in one."""
        return 1 if self.shares == 1 else _HALVES * self.shares

    def for_each(self, visit: Callable[[Any, Any, Any, Any, Any, Any], None]) -> Any:
        """`visit(expert, block of units, share, first step, steps, steps of before)` of the block's; all its steps."""
        product = SplitProduct(self.depth, self.experts * self.units, self.shares)
        of_expert = self.units // WGMMA_ROWS

        def visit_share(share: Any, block: Any, first: Any, steps: Any, done: Any) -> None:
            visit(lax.div(block, of_expert), lax.rem(block, of_expert), share, first, steps, done)

        return product.for_each(lax.axis_index("block"), visit_share, 0)


@dataclasses.dataclass(frozen=True)
class SharesOfHidden:
    """Where shares of hidden units are: of an expert one row for each half of each share.

    Attributes:
        ref: In global memory, by its flat places; as `Sums.ref`.
        begin: Of the first row.
        expert_stride, row_stride: From one to the next.
        units: Of an expert.
        shares: How many.
        activation: What makes hidden units of both halves.
    """

    ref: Any
    begin: int
    expert_stride: int
    row_stride: int
    units: int
    shares: int
    activation: Callable[[Any, Any], Any]

    def store(self, expert: Any, block: Any, share: Any, halves: list[jax.Array]) -> None:
        """A block's share of both halves, the first row of each."""
        for half, sums in enumerate(halves):
            row = share * _HALVES + half
            place = self.begin + expert * self.expert_stride + row * self.row_stride + block * WGMMA_ROWS
            store_row(self.ref, place, never_zero(sums), 0)

    def bring(self, target: Any, expert: Any) -> None:
        """An expert's hidden units as a tile's first row, which has whole pieces."""
        for begin in range(0, target.shape[1], LEAST):
            piece = Piece(begin, LEAST, 0)
            places = expert * self.expert_stride + lax.rem(piece.numbers, self.units)
            halves = [
                Sums(self.ref, self.begin + half * self.row_stride, _HALVES * self.row_stride, self.shares).added_up(
                    places, piece.layout
                )
                for half in range(_HALVES)
            ]
            store_in_tile(target, self.activation(*halves).astype(target.dtype), piece)
        plgpu.commit_smem()
