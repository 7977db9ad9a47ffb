"""How hidden units of one token's experts get from the blocks that make them to those that multiply them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common.arrivals import Sums, never_zero
from jattn_kernels.mosaic.sm90.common.one_row import store_in_tile
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST, Piece
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_shared import SharesOfHidden
from jattn_kernels.mosaic.sm90.experts.one_token_stages import Count, Scratch, store_row


@dataclasses.dataclass(frozen=True)
class CountedHidden:
    """In rows of the weights' dtype, one a choice; who reads them waits until all are there, and has all of them.

    Attributes:
        ref: (8, units), in global memory.
        count: Of blocks of them that have been stored.
        blocks: How many there are.
    """

    ref: Any
    count: Count
    blocks: int

    def store(self, choice: Any, block: Any, result: jax.Array) -> None:
        """A block of a choice's, the first row of a result."""
        store_row(self.ref, choice * self.ref.shape[1] + block * WGMMA_ROWS, result.astype(self.ref.dtype), 0)
        self.count.tell()

    def bring(self, scratch: Scratch, choice_of: Callable[[Any], Any]) -> None:
        """Brings what the block's units need.

        Args:
            choice_of: The choice of its n-th unit; of numbers past its last too.
        """
        del choice_of
        self.count.wait(self.blocks)
        plgpu.copy_gmem_to_smem(self.ref, self._rows(scratch), scratch.hidden_full)
        plgpu.barrier_wait(scratch.hidden_full)

    def of_unit(self, scratch: Scratch, number: Any, choice: Any) -> tuple[Any, Any]:
        """What the n-th unit multiplies, and in which of its rows the choice is."""
        del number
        return self._rows(scratch), choice

    def _rows(self, scratch: Scratch) -> Any:
        return scratch.x.at[:, pl.ds(0, self.ref.shape[1])]


@dataclasses.dataclass(frozen=True)
class ToldHidden:
    """In float32, each telling by itself that it is there: a block waits for those of its own units alone.

    Attributes:
        sums: Where they are: of one split, a stride from one choice to the next.
        units: Of a choice.
        most: Units of different choices that a block has at most.
        dtype: Of the weights, to which they are rounded.
        shared: Those of the first choices, if blocks have shares of them; a block's units are of one choice then.
        num_shared: So many first choices.
    """

    sums: Sums
    units: int
    most: int
    dtype: Any
    shared: SharesOfHidden | None = None
    num_shared: int = 0

    @property
    def width(self) -> int:
        """Numbers of the rows of a block's units, one after another, in whole pieces."""
        return told_width(self.units, self.most)

    def store(self, choice: Any, block: Any, result: jax.Array) -> None:
        """As of `CountedHidden`."""
        rounded = result.astype(self.dtype).astype(jnp.float32)
        place = self.sums.begin + choice * self.sums.stride + block * WGMMA_ROWS
        store_row(self.sums.ref, place, never_zero(rounded), 0)

    def bring(self, scratch: Scratch, choice_of: Callable[[Any], Any]) -> None:
        """As of `CountedHidden`."""
        if self.shared is None:
            self._bring_whole(scratch, choice_of)
            return
        choice, target = choice_of(0), scratch.x.at[:, pl.ds(0, self.width)]
        is_shared = choice < self.num_shared
        pl.when(is_shared)(functools.partial(self.shared.bring, target, choice))
        pl.when(~is_shared)(functools.partial(self._bring_whole, scratch, choice_of))

    def _bring_whole(self, scratch: Scratch, choice_of: Callable[[Any], Any]) -> None:
        piece = Piece(0, self.width, 0)
        column = piece.numbers
        places = choice_of(lax.div(column, self.units)) * self.sums.stride + lax.rem(column, self.units)
        numbers = self.sums.added_up(places, piece.layout).astype(self.dtype)
        store_in_tile(scratch.x.at[:, pl.ds(0, self.width)], numbers, piece)
        plgpu.commit_smem()

    def of_unit(self, scratch: Scratch, number: Any, choice: Any) -> tuple[Any, Any]:
        """As of `CountedHidden`."""
        del choice
        if self.most == 1:
            return scratch.x.at[:, pl.ds(0, self.units)], 0
        return scratch.x.at[:, pl.ds(pl.multiple_of(number * self.units, self.units), self.units)], 0


def told_width(units: int, most: int) -> int:
    """What the rows of so many units take, one after another, in whole pieces."""
    return pl.cdiv(most * units, LEAST) * LEAST
