"""Sizes of decode's tiles that `python -m bench.tune` found best on a GPU, in place of the heuristic's."""

from typing import NamedTuple

from jattn_kernels.lowering.tile_file import TileFile


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


TILES = TileFile("JATTN_DECODE_TILES", Shape, Arrangement)
VARIABLE, tuned = TILES.variable, TILES.tuned
