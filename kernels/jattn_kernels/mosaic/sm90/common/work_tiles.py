"""Work tiles of a split-KV schedule on the device: a worker's own, read one ahead of their use."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


class WorkTile(NamedTuple):
    """A split of a sequence: tiles [first, end) of it, one of `splits`."""

    sequence: Any
    first: Any
    end: Any
    splits: Any
    end_key: Any


class WorkTiles(NamedTuple):
    """A worker's work tiles [begin, end), and the first one, whose fields have no meaning if there is none."""

    begin: Any
    end: Any
    first: WorkTile


def read_work_tiles(operands: Any) -> WorkTiles:
    """What the block's worker has to do.

    Args:
        operands: `work_tiles` and `workers` of the schedule among others.
    """
    begin, end, *first = (operands.workers[lax.axis_index("worker"), field] for field in range(7))
    return WorkTiles(begin, end, WorkTile(*first))


def _read_work_tile(operands: Any, number) -> WorkTile:
    """A work tile of the schedule; the last one in place of one behind it."""
    number = jnp.minimum(number, operands.work_tiles.shape[0] - 1)
    return WorkTile(*(operands.work_tiles[number, field] for field in range(5)))


def walk(operands: Any, work_tiles: WorkTiles, visit, state):
    """Calls `visit(number, work_tile, next one, state) -> state` for each work tile, which is read one ahead."""

    def step(number, carry):
        now, state = carry
        following = _read_work_tile(operands, number + 1)
        return following, visit(number, now, following, state)

    return lax.fori_loop(work_tiles.begin, work_tiles.end, step, (work_tiles.first, state))[1]
