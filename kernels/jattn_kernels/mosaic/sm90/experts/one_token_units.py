"""The units of both products of one token's mixture in mxfp4: which block has which."""

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
    """Of the first product 32 hidden units of an expert; of the second 64 columns and half of the depth of an expert.

    Of the first a block has every n-th; of the second neighbours, expert after expert of a block of columns, which it
    adds up: so many blocks have a part of those columns.

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
            return self._begin(own + 1) - self._begin(own)
        return lax.div(self.total(False) - own + sms - 1, sms)

    def for_each(self, of_second: bool, visit: Callable[..., Any], start: Any) -> Any:
        """Calls `visit(number, choice, block of columns, half, carry)` for each unit of the block's; the last carry."""

        def step(number, carry):
            return visit(number, *self._unit(of_second, number), carry)

        return lax.fori_loop(0, self.count(of_second), step, start)

    def steps_of(self, of_second: bool, half: Any) -> tuple[Any, Any]:
        """The first of a unit's stages along the depth, and how many."""
        if not of_second:
            return 0, jnp.int32(self.steps)
        first, end = (lax.div((half + side) * self.steps, HALVES) for side in range(2))
        return first, end - first

    def row(self, number: Any) -> Any:
        """Of the block's n-th unit of the second product: experts that its units are of are rows, one after another."""
        return lax.div(self._begin(lax.axis_index("block")) + number, HALVES) - self._first_row

    def choice_of_row(self, row: Any) -> Any:
        """The number of the choice; of a row past the last one that of the last."""
        last = lax.div(self._begin(lax.axis_index("block") + 1) - 1, HALVES)
        return lax.rem(jnp.clip(self._first_row + row, 0, jnp.maximum(last, 0)), self.per_token)

    @property
    def most_rows(self) -> int:
        """Of any block."""
        return (pl.cdiv(self.total(True), tiles.num_sms()) + HALVES - 2) // HALVES + 1

    @property
    def num_parts(self) -> int:
        """Blocks that have units of the same columns, at most."""
        ends = range(self._of_column - 1, self.total(True), self._of_column)
        return max(self._static_block(end) - self._static_block(end - self._of_column + 1) for end in ends) + 1

    def part(self, block: Any) -> Any:
        """Which part of such columns is the block's own."""
        sms, total = tiles.num_sms(), self.total(True)
        first = block * self._of_column
        return lax.axis_index("block") - (first if total < sms else lax.div((first + 1) * sms - 1, total))

    def ends_part(self, number: Any) -> Any:
        """Whether the block's next unit, if any, is of other columns."""
        is_last = number == self.count(True) - 1
        return is_last | self.ends_columns(number)

    def ends_columns(self, number: Any) -> Any:
        """Whether no block has more of these columns."""
        unit = self._begin(lax.axis_index("block")) + number
        return lax.rem(unit, self._of_column) == self._of_column - 1

    @property
    def _of_column(self) -> int:
        """Units of the second product of a block of columns."""
        return HALVES * self.per_token

    @property
    def _first_row(self) -> Any:
        return lax.div(self._begin(lax.axis_index("block")), HALVES)

    def _unit(self, of_second: bool, number: Any) -> tuple[Any, Any, Any]:
        """The number of the choice, the block of columns, and the half of the depth."""
        if of_second:
            block, own = (
                op(self._begin(lax.axis_index("block")) + number, self._of_column) for op in (lax.div, lax.rem)
            )
            return lax.div(own, HALVES), block, lax.rem(own, HALVES)
        unit, blocks = lax.axis_index("block") + number * tiles.num_sms(), self.hidden // self.side(False)
        return lax.div(unit, blocks), lax.rem(unit, blocks), jnp.int32(0)

    def _begin(self, block: Any) -> Any:
        """A block's first unit of the second product."""
        sms, total = tiles.num_sms(), self.total(True)
        return jnp.minimum(block, total) if total < sms else lax.div(block * total, sms)

    def _static_block(self, unit: int) -> int:
        """That has this unit of the second product."""
        sms, total = tiles.num_sms(), self.total(True)
        return unit if total < sms else ((unit + 1) * sms - 1) // total
