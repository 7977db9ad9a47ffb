"""Which units of a grouped product of few tokens a block has: its share of all, which are neighbours."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles


class Unit(NamedTuple):
    """Rows of an expert, a block of columns, a share of the depth.

    Attributes:
        tile: Number of the rows' work tile.
    """

    tile: Any
    expert: Any
    first: Any
    rows: Any
    block: Any
    split: Any


def for_each_unit(
    work: Any, share: tuple[Any, Any], blocks_and_splits: tuple[int, int], visit: Callable[..., Any], start: Any
) -> Any:
    """`visit(unit, the one before, the next one, number, units left, carry) -> carry` for each of the block's.

    A unit is read from memory one ahead.

    Args:
        work: As in ProductOperands.
        share: The first of the block's units, and the first one behind them.
        blocks_and_splits: Blocks of columns, and shares of the depth, that a tile's rows are multiplied with.
    """
    blocks, splits = blocks_and_splits
    first, end = share

    def read(number):
        tile, rest = lax.div(number, blocks * splits), lax.rem(number, blocks * splits)
        tile = jnp.minimum(tile, work.shape[0] - 1)
        expert, slot, rows = (work[tile, field] for field in range(3))
        return Unit(tile, expert, slot, rows, lax.rem(rest, blocks), lax.div(rest, blocks))

    def step(i, carry):
        before, unit, inner = carry
        following = read(first + i + 1)
        return unit, following, visit(unit, before, following, i, end - first - i - 1, inner)

    begin = read(first)
    nobody = begin._replace(tile=begin.tile - 1)
    return lax.fori_loop(0, end - first, step, (nobody, begin, start))[2]


def equal_share(num_tiles: Any, units_of_tile: int) -> tuple[Any, Any]:
    """A block's, of as many units as others have: the first, and the first one behind them."""
    own, total = lax.axis_index("block"), num_tiles * units_of_tile
    first, end = (lax.div((own + side) * total, tiles.num_sms()) for side in range(2))
    return first, end
