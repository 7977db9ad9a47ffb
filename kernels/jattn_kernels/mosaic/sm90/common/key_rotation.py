"""Tiles of keys rotated where they are, by their numbers in their sequence: tables made in XLA, and the device's part.

The angle of a key is that of the first key of its piece, of 64, and that of its number in the piece: two small tables
stand for all positions.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.lowering.rope import shrink_of
from jattn_kernels.mosaic.sm90.common.convert import Rotation, rotate_pairs, rotated_by, rotation_of
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.spec import AttentionSpec

_PIECE = WGMMA_ROWS  # keys


class RotationTables(NamedTuple):
    """The angles of a sequence's keys.

    Attributes:
        pieces: Of the first key of each piece, over what keys of the stored dtype are made smaller by.
        keys: Of each key of a piece, by its number there.
    """

    pieces: Rotation
    keys: Rotation

    @classmethod
    def of(cls, num_keys: int, spec: AttentionSpec, kv_dtype: Any) -> "RotationTables":
        """Those of at most so many keys, in whole tiles, that are stored in a dtype."""
        first = jnp.arange(num_keys // _PIECE, dtype=jnp.int32) * _PIECE
        # float16 is exact enough for the second: keys are rounded that much, or more, when they have been rotated.
        return cls(
            rotation_of(first, spec, jnp.float32, shrink_of(kv_dtype)),
            rotation_of(jnp.arange(_PIECE, dtype=jnp.int32), spec, jnp.float16),
        )


@dataclasses.dataclass(frozen=True)
class KeyRotation:
    """What a warpgroup rotates tiles of keys with.

    Attributes:
        pieces: As in `RotationTables`, in memory.
        keys: The same of the pairs from each column on, in registers.
        block_kv: Keys a tile.
    """

    pieces: Rotation
    keys: dict[int, Rotation]
    block_kv: int

    @classmethod
    def load(cls, tables: RotationTables, block_kv: int) -> "KeyRotation":
        """Reads what all tiles have in common."""
        pairs = tables.keys.cos.shape[-1]
        width = _width(pairs)
        keys = {
            column: _load(tables.keys, (slice(None), pl.ds(column, width)), plgpu.Layout.WGMMA)
            for column in range(0, pairs, width)
        }
        return cls(tables.pieces, keys, block_kv)

    def first(self, tile: Any) -> Rotation:
        """What `rotate` begins with. It comes from memory: asked for early, nothing waits for it."""
        return self._of_piece(tile, 0, 0)

    def rotate(self, keys: Any, tile: Any, first: Rotation) -> None:
        """Keys of a tile in shared memory rotated by their numbers.

        Args:
            first: What the method of that name gave.
        """
        pairs = keys.shape[-1] // 2
        # Some rows and pairs at a time: registers are few.
        pieces = list(itertools.product(range(0, self.block_kv, _PIECE), self.keys))
        of_pieces = [first]
        for number, (row, column) in enumerate(pieces):
            of_pieces += [self._of_piece(tile, *piece) for piece in pieces[number + 1 : number + 2]]
            halves = [keys.at[pl.ds(row, _PIECE), pl.ds(begin + column, _width(pairs))] for begin in (0, pairs)]
            rotate_pairs(halves, halves, rotated_by(self.keys[column], of_pieces[number]))

    def _of_piece(self, tile: Any, row: int, column: int) -> Rotation:
        place = lax.div(tile * self.block_kv + row, _PIECE), pl.ds(column, _width(self.pieces.cos.shape[-1]))
        return _load(self.pieces, place, plgpu.Layout.WGMMA.reduce(0))


def _width(pairs: int) -> int:
    """Pairs that are rotated at a time: whole columns of what lies together in tiled memory."""
    return 32 if pairs % 64 else 64


def _load(rotations: Rotation, place: tuple[Any, ...], layout: Any) -> Rotation:
    return Rotation(*(plgpu.load(part.at[place], layout=layout, optimized=False) for part in rotations))
