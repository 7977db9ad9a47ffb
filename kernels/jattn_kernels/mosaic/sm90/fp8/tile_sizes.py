"""How a product of 8-bit numbers is cut into work tiles."""

import dataclasses
import itertools

import jax.experimental.pallas as pl

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.product_tiles import COLUMN_STEP
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS

BLOCK_DEPTH = 128  # of a stage: what a swizzled row of shared memory holds
_MOST_ROWS = 256  # columns of a wgmma
_HALF = 128
_MOST_SPLITS = 16
_MOST_STAGES = 12
_SUM_BYTES, _COST_OF_SUMS = 4, 3
_STAGED_ROWS = 64
_MEETING_BYTES = 1024
_ONE_CONSUMER = 16  # rows up to which a work tile has 64 columns: more of them share what they read of x
_UNEVEN_ROWS = 64  # up to which a work tile may have any multiple of 32 columns, of the consumers' last some twice
_MOST_COLUMNS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Tiles:
    """Sizes of a product's work tiles.

    Attributes:
        block_rows: Rows of x.
        consumers: Warpgroups that multiply; each has 64 columns of the result, the last one some of the one before.
        block_columns: Columns of the result.
        splits: Of the depth; each one's sums stand by themselves.
        stages: Of the copies.
        cluster: Blocks that take neighbouring columns of the same rows, and share the copies of those.
        whole_row: Whether x is one row, all of it in shared memory all the time.
    """

    block_rows: int
    consumers: int
    block_columns: int
    splits: int = 1
    stages: int
    cluster: int = 1
    whole_row: bool = False

    @property
    def staged_rows(self) -> int:
        """Rows of a result that are stored at a time; two such parts are in shared memory."""
        return _STAGED_ROWS if self.block_rows % _STAGED_ROWS == 0 else self.block_rows


def choose_tiles(*, rows: int, depth: int, columns: int, out_bytes: int, whole_row: bool = False) -> Fp8Tiles:
    """For prompts tiles of 128 x 256; for fewer rows what costs least, splits enough for all SMs among it."""
    whole = pl.cdiv(rows, TILED_ROWS) * TILED_ROWS
    heights = {min(whole, height) for height in ((_MOST_ROWS,) if rows > _MOST_ROWS else (_MOST_ROWS, _HALF))}
    widths = _widths(whole, columns)
    steps = pl.cdiv(depth, BLOCK_DEPTH)

    def cost(height: int, width: int, splits: int) -> int:
        """Bytes: as many from each SM as from the busiest, and those of the sums, which are stored and read again."""
        work_tiles = pl.cdiv(rows, height) * pl.cdiv(columns, width) * splits
        steps_here = pl.cdiv(work_tiles, tiles.num_sms()) * pl.cdiv(steps, splits)
        sums = rows * columns * splits * _SUM_BYTES if splits > 1 else 0
        return steps_here * tiles.num_sms() * _stage_bytes(height, width) + _COST_OF_SUMS * sums

    most_splits = 1 if rows > _MOST_ROWS else min(steps, _MOST_SPLITS)
    choices = itertools.product(sorted(heights, reverse=True), widths, range(1, most_splits + 1))
    block_rows, block_columns, splits = min(choices, key=lambda choice: cost(*choice))
    consumers = pl.cdiv(block_columns, WGMMA_ROWS)
    shares = rows > block_rows and splits == 1 and tiles.interpret_params() is None and tiles.num_sms() % 2 == 0
    sizes = Fp8Tiles(
        block_rows=block_rows,
        consumers=consumers,
        block_columns=block_columns,
        splits=splits,
        stages=1,
        cluster=2 if shares else 1,
    )
    staged = 2 * sizes.staged_rows * sizes.block_columns * out_bytes if splits == 1 else 0
    fixed = whole * depth + _MEETING_BYTES if whole_row else 0
    left = tiles.SHARED_MEMORY_BYTES - tiles.RESERVED_BYTES - staged - fixed
    return dataclasses.replace(
        sizes, whole_row=whole_row, stages=min(_MOST_STAGES, left // _stage_bytes(block_rows, block_columns))
    )


def _widths(rows: int, columns: int) -> list[int]:
    """Columns that a work tile of so many rows may have."""
    if rows <= _ONE_CONSUMER or columns % (2 * WGMMA_ROWS):
        return [WGMMA_ROWS]
    if rows > _UNEVEN_ROWS or tiles.interpret_params() is not None:
        return [2 * WGMMA_ROWS]
    return [
        width
        for width in range(COLUMN_STEP, _MOST_COLUMNS + 1, COLUMN_STEP)
        if width >= WGMMA_ROWS and columns % width == 0
    ]


def _stage_bytes(block_rows: int, block_columns: int) -> int:
    return (block_rows + block_columns) * BLOCK_DEPTH
