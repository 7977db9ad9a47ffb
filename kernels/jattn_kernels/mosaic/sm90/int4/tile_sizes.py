"""How a product with weights of 4 bits is cut into work tiles."""

import dataclasses

import jax.experimental.pallas as pl

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS

BLOCK_DEPTH = 128  # of a stage
_MOST_ROWS = 128  # of a work tile: more of them and their sums do not fit the registers beside the weights
_FEW_ROWS = 16  # whose sums leave registers for four consumers
_MOST_SPLITS = 16
_MOST_STAGES = 12
_ITEM_BYTES, _SUM_BYTES = 2, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4Tiles:
    """Sizes of a product's work tiles.

    Attributes:
        block_rows: Rows of x.
        consumers: Warpgroups that multiply; each has 64 columns of the result.
        splits: Of the depth; each one's sums stand by themselves.
        stages: Of the copies.
    """

    block_rows: int
    consumers: int
    splits: int
    stages: int

    @property
    def block_columns(self) -> int:
        """Columns of the result."""
        return self.consumers * WGMMA_ROWS


def choose_tiles(*, rows: int, depth: int, columns: int, groups: int) -> Int4Tiles:
    """As many rows in a work tile as there are, and splits enough for all SMs."""
    block_rows = min(pl.cdiv(rows, TILED_ROWS) * TILED_ROWS, _MOST_ROWS)
    most = 4 if block_rows <= _FEW_ROWS else 2
    consumers = next(number for number in (4, 2, 1) if number <= most and not columns % (number * WGMMA_ROWS))
    row_blocks, column_blocks = pl.cdiv(rows, block_rows), pl.cdiv(columns, consumers * WGMMA_ROWS)
    groups_of_step = pl.cdiv(groups * BLOCK_DEPTH, depth)
    of_column = BLOCK_DEPTH // 2 + groups_of_step * _SUM_BYTES
    stage = block_rows * BLOCK_DEPTH * _ITEM_BYTES + consumers * WGMMA_ROWS * of_column
    steps, sums, sms = pl.cdiv(depth, BLOCK_DEPTH), rows * columns * _SUM_BYTES, tiles.num_sms()

    def bytes_of_all(splits: int) -> int:
        steps_here = pl.cdiv(row_blocks * column_blocks * splits, sms) * pl.cdiv(steps, splits)
        return steps_here * sms * stage + 2 * splits * sums

    return Int4Tiles(
        block_rows=block_rows,
        consumers=consumers,
        splits=min(range(1, min(steps, _MOST_SPLITS) + 1), key=bytes_of_all),
        stages=min(_MOST_STAGES, (tiles.SHARED_MEMORY_BYTES - tiles.RESERVED_BYTES) // stage),
    )
