"""Copies of tiles of keys that are not in pages: the rows of all sequences, one after the other."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, PoolPlace


@dataclasses.dataclass(frozen=True)
class RowCopies:
    """How a tile of keys is cut out of rows, in the terms of `PageCopies`.

    A copy into tiled memory begins at a multiple of 8 rows: a sequence's first tile begins with rows of the one before.

    Attributes:
        block_kv: Keys a tile.
        rows: Keys that one copy brings.
    """

    block_kv: int
    rows: int

    @property
    def copies(self) -> int:
        """Copies a tile."""
        return self.block_kv // self.rows

    def pages(self, offsets_ref: Any, sequence: jax.Array, tile_index: Any, last_key: jax.Array) -> list[jax.Array]:
        """Where a tile begins, in units of 8 rows."""
        return [jax.lax.div(offsets_ref[sequence], TILED_ROWS) + tile_index * (self.block_kv // TILED_ROWS)]

    def start(
        self, rows_ref: Any, place: PoolPlace, pages: list[Any], tile_index: Any, smem: Any, barrier: Any
    ) -> None:
        """Starts the copies of one tile of keys or values."""
        for first in range(0, self.block_kv, self.rows):
            rows = pl.ds(pl.multiple_of(pages[0] * TILED_ROWS + first, TILED_ROWS), self.rows)
            target = smem.at[pl.ds(first, self.rows)]
            plgpu.copy_gmem_to_smem(rows_ref.at[place.layer, rows, place.head], target, barrier)
