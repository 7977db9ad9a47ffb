"""Which units of a product of one row a block has: columns of the weights, and a share of the depth."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
from jax import lax

from jattn_kernels.mlp_operands import MOST_SPLITS
from jattn_kernels.mosaic.sm90.common import tiles

SIDE = 32  # columns of a unit's weights: few enough that all SMs have nearly as many units
DEPTH = 512  # inputs of a step, which is a stage of shared memory
SHARES = 2  # of a step's depth, each of which is a copy of 128 bytes a column
PARTS = 2  # in which a unit's columns come: those of a gate, and those of what it gates


@dataclasses.dataclass(frozen=True)
class RowProduct:
    """A product of one row. A block takes every n-th of its units.

    Attributes:
        depth, columns: Of the weights.
        is_gated: Whether halves of the columns are a gate and what it gates, of which the result has one number.
        splits: Shares of the depth.
    """

    depth: int
    columns: int
    is_gated: bool = False
    splits: int = 1

    @classmethod
    def of(cls, depth: int, columns: int) -> "RowProduct":
        """One in the fewest shares of the depth that make an SM's longest work shortest."""
        blocks, steps = columns // SIDE, depth // DEPTH

        def longest(splits: int) -> int:
            return pl.cdiv(blocks * splits, tiles.num_sms()) * pl.cdiv(steps, splits)

        return cls(depth, columns, splits=min(range(1, min(steps, MOST_SPLITS) + 1), key=longest))

    @property
    def side(self) -> int:
        """Columns of the result that a unit has."""
        return SIDE // PARTS if self.is_gated else SIDE

    @property
    def result_columns(self) -> int:
        return self.columns // PARTS if self.is_gated else self.columns

    @property
    def most(self) -> int:
        """Units of a block, at most."""
        return pl.cdiv(self._blocks * self.splits, tiles.num_sms())

    @property
    def count(self) -> Any:
        """The block's units."""
        sms = tiles.num_sms()
        return lax.div(self._blocks * self.splits - lax.axis_index("block") + sms - 1, sms)

    def for_each(self, visit: Callable[..., Any], start: Any) -> Any:
        """Calls `visit(number, block of columns, split, first step, steps, carry)` for each of the block's units."""

        def step(number, carry):
            unit, steps = lax.axis_index("block") + number * tiles.num_sms(), self.depth // DEPTH
            block, split = lax.rem(unit, self._blocks), lax.div(unit, self._blocks)
            first, end = (lax.div((split + side) * steps, self.splits) for side in range(2))
            return visit(number, block, split, first, end - first, carry)

        return lax.fori_loop(0, self.count, step, start)

    def first_columns(self, block: Any) -> list[Any]:
        """Where the parts of a unit's columns begin in the weights."""
        side = SIDE // PARTS
        begin, apart = (block * side, self.columns // PARTS) if self.is_gated else (block * SIDE, side)
        return [begin + part * apart for part in range(PARTS)]

    @property
    def _blocks(self) -> int:
        return self.result_columns // self.side
