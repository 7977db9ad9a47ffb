"""The units of both products of one token's mixture in one kernel: which block has which."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS

HALVES = 2  # of an expert's hidden units; of the second product's depth


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneTokenUnits:
    """Of the first product 32 hidden units of an expert; of the second 64 columns and half of the depth.

    Attributes:
        per_token: Experts that are chosen.
        hidden: Units of an expert, and columns of the token.
        steps: Stages along the depth.
    """

    per_token: int
    hidden: int
    steps: int

    def side(self, of_second: bool) -> int:
        """Columns of a unit, of each part of its 64."""
        return WGMMA_ROWS if of_second else WGMMA_ROWS // HALVES

    def total(self, of_second: bool) -> int:
        """All blocks' units of a product."""
        return self.per_token * self.hidden // self.side(of_second) * (HALVES if of_second else 1)

    def count(self, of_second: bool) -> Any:
        """The block's units of a product."""
        own, sms = lax.axis_index("block"), tiles.num_sms()
        if of_second:
            return self._begin(True, own + 1) - self._begin(True, own)
        return lax.div(self.total(False) - own + sms - 1, sms)

    def unit(self, of_second: bool, number: Any) -> tuple[Any, Any]:
        """Of the block's n-th unit: the number of the choice, in each half of the depth, and the block of columns."""
        begin, blocks = self._begin(of_second, lax.axis_index("block")), self.hidden // self.side(of_second)
        unit = begin + number * (1 if of_second else tiles.num_sms())
        return lax.div(unit, blocks), lax.rem(unit, blocks)

    @property
    def first_choice(self) -> Any:
        """Of the block's units of the second product, counted through both halves of the depth."""
        return self.unit(True, 0)[0]

    @property
    def count_of_choices(self) -> Any:
        """That the block's units of the second product are of, one after the other."""
        return jnp.where(self.count(True) > 0, self.unit(True, self.count(True) - 1)[0] + 1 - self.first_choice, 0)

    @property
    def most_choices(self) -> int:
        """Of any block."""
        most = pl.cdiv(self.total(True), tiles.num_sms())
        return min((most - 2) // (self.hidden // WGMMA_ROWS) + 2, HALVES * self.per_token) if most > 1 else 1

    def for_each(self, of_second: bool, visit: Callable[..., Any], start: Any) -> Any:
        """Calls `visit(number, choice, block of columns, half, carry)` for each unit of the block's; the last carry."""

        def step(number, carry):
            choice, block = self.unit(of_second, number)
            return visit(number, lax.rem(choice, self.per_token), block, lax.div(choice, self.per_token), carry)

        return lax.fori_loop(0, self.count(of_second), step, start)

    def steps_of(self, of_second: bool, half: Any) -> tuple[Any, Any]:
        """The first of a unit's stages along the depth, and how many."""
        if not of_second:
            return 0, jnp.int32(self.steps)
        first, end = (lax.div((half + side) * self.steps, HALVES) for side in range(2))
        return first, end - first

    def _begin(self, of_second: bool, block: Any) -> Any:
        """A block's first unit of the second product, which has neighbours of it; of the first every n-th."""
        return lax.div(block * self.total(True), tiles.num_sms()) if of_second else block
