"""Sizes of decode's tiles that `python -m bench.tune` found best on a GPU, in place of the heuristic's.

A file of them, one JSON object a line, is named by the environment variable JATTN_DECODE_TILES.
"""

import functools
import json
import os
from pathlib import Path
from typing import NamedTuple

VARIABLE = "JATTN_DECODE_TILES"


class Shape(NamedTuple):
    """What the best sizes depend on.

    Attributes:
        block_rows: Query rows of a block.
        kv_itemsize: Bytes of a number of a key or value.
        rotates: Whether queries and keys are rotated in the kernel.
    """

    block_rows: int
    head_dim: int
    v_head_dim: int
    kv_itemsize: int
    rotates: bool


class Arrangement(NamedTuple):
    """What is chosen; as in `DecodeTiles`."""

    stages: int
    blocks_per_sm: int
    warpgroups: int


def tuned(shape: Shape) -> Arrangement | None:
    """What the file says of a shape, if one is named.

    Raises:
        ValueError: The file cannot be read as such.
    """
    name = os.environ.get(VARIABLE)
    return read(name).get(shape) if name else None


@functools.cache
def read(name: str) -> dict[Shape, Arrangement]:
    """All that a file says; read once.

    Raises:
        ValueError: It cannot be read, or a line is not what `line` writes.
    """
    found = {}
    try:
        for text in Path(name).read_text(encoding="utf-8").splitlines():
            row = json.loads(text)
            shape, arrangement = (of(**{field: row[field] for field in of._fields}) for of in (Shape, Arrangement))
            if not all(type(value) is int and value > 0 for value in (*shape[:-1], *arrangement)):
                raise ValueError(f"sizes must be whole numbers of at least 1: {text}")
            found[shape] = arrangement
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"${VARIABLE} must name a file that `python -m bench.tune` wrote. Got {name}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return found


def line(shape: Shape, arrangement: Arrangement, **more: object) -> str:
    """A line of such a file; what else is told with it is not read back."""
    return json.dumps({**shape._asdict(), **arrangement._asdict(), **more})
