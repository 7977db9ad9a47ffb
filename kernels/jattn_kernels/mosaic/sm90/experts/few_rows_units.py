"""Which units of a grouped product of few tokens a block has: its share of all, which are neighbours."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.experts.few_rows_shares import share_of_units


class Unit(NamedTuple):
    """Rows of an expert and a block of columns.

    Attributes:
        tile: Number of the rows' work tile.
    """

    tile: Any
    expert: Any
    first: Any
    rows: Any
    block: Any


class Share(NamedTuple):
    """A block's units: of all tiles' the numbers from `first` to `end`.

    Attributes:
        work: As in ProductOperands.
        blocks: Of columns, that a tile's rows are multiplied with.
    """

    work: Any
    blocks: int
    first: Any
    end: Any

    @classmethod
    def of(cls, work: Any, num_tiles: Any, blocks: int, *, alike: bool) -> "Share":
        """The own block's, of so many tiles.

        Args:
            alike: Whether the units of all tiles take as long.
        """
        if not alike:
            return cls(work, blocks, *share_of_units(work, num_tiles, blocks))
        total, sms, own = num_tiles * blocks, tiles.num_sms(), lax.axis_index("block")
        first, end = (lax.div((own + side) * total, sms) for side in range(2))
        return cls(work, blocks, first, end)

    def unit(self, number: Any) -> Unit:
        """Reads it; one past the end may be read too."""
        tile = jnp.minimum(lax.div(number, self.blocks), self.work.shape[0] - 1)
        expert, slot, rows = (self.work[tile, field] for field in range(3))
        return Unit(tile, expert, slot, rows, lax.rem(number, self.blocks))

    def for_each(self, visit: Callable[[Unit, Any], Any]) -> None:
        """`visit(unit, number)`: a unit is read from memory one ahead."""

        def step(number, unit):
            following = self.unit(number + 1)
            visit(unit, number)
            return following

        lax.fori_loop(self.first, self.end, step, self.unit(self.first))

    def for_each_tile(self, visit: Callable[[Unit, Any, Any], Any]) -> None:
        """`visit(unit, first, end)`: of each tile the first of the block's units, and the numbers of all."""

        @pl.loop(lax.div(self.first, self.blocks), lax.div(self.end + self.blocks - 1, self.blocks))
        def visit_tile(tile):
            first = jnp.maximum(self.first, tile * self.blocks)
            end = jnp.minimum(self.end, (tile + 1) * self.blocks)
            pl.when(first < end)(lambda: visit(self.unit(first), first, end))
