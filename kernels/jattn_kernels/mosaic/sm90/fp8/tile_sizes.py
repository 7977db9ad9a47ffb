"""How a product of 8-bit numbers is cut into work tiles."""

import dataclasses

import jax.experimental.pallas as pl

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS

BLOCK_DEPTH = 128  # of a stage: what a swizzled row of shared memory holds
_MOST_ROWS = 256  # columns of a wgmma
_HALF = 128
_MOST_SPLITS = 16
_MOST_STAGES = 12
_SUM_BYTES, _COST_OF_SUMS = 4, 3
_STAGED_ROWS = 64
WIDTHS = 16  # what those of work tiles differ by
_MEETING_BYTES = 1024
_ONE_CONSUMER = 16  # rows up to which a work tile has 64 columns: more of them share what they read of x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Tiles:
    """Sizes of a product's work tiles.

    Attributes:
        block_rows: Rows of x.
        block_columns: Columns of the result, a multiple of 16.
        consumers: Warpgroups that multiply; each has 64 of these columns, of which the last two may share some.
        splits: Of the depth; each one's sums stand by themselves.
        stages: Of the copies.
        cluster: Blocks that take neighbouring columns of the same rows, and share the copies of those.
        whole_row: Whether x is one row, all of it in shared memory all the time.
    """

    block_rows: int
    block_columns: int
    consumers: int
    splits: int = 1
    stages: int
    cluster: int = 1
    whole_row: bool = False

    @property
    def staged_rows(self) -> int:
        """Rows of a result that are stored at a time; two such parts are in shared memory."""
        return _STAGED_ROWS if self.block_rows % _STAGED_ROWS == 0 else self.block_rows

    @property
    def overlap(self) -> int:
        """Columns that the last two consumers share."""
        return self.consumers * WGMMA_ROWS - self.block_columns


def choose_tiles(
    *, rows: int, depth: int, columns: int, out_bytes: int, rounded: bool = False, whole_row: bool = False
) -> Fp8Tiles:
    """For prompts tiles of 128 x 256; for fewer rows what costs least, splits enough for all SMs among it.

    Args:
        rounded: Whether splits are stored in the result's dtype.
    """
    whole = pl.cdiv(rows, TILED_ROWS) * TILED_ROWS
    heights = {min(whole, height) for height in ((_MOST_ROWS,) if rows > _MOST_ROWS else (_MOST_ROWS, _HALF))}
    consumers = 1 if whole <= _ONE_CONSUMER or columns % (2 * WGMMA_ROWS) else 2
    steps = pl.cdiv(depth, BLOCK_DEPTH)

    def widths(splits: int) -> list[int]:
        """Of work tiles; those that give each SM as many columns, where columns may be stored twice."""
        whole_strips = consumers * WGMMA_ROWS
        if consumers == 1 or rows > _STAGED_ROWS or (splits > 1 and not rounded):
            return [whole_strips]
        between = range(WGMMA_ROWS + WIDTHS, whole_strips, WIDTHS)
        return [whole_strips, *(width for width in between if columns % width == 0)]

    def cost(height: int, width: int, splits: int) -> int:
        """Bytes: as many from each SM as from the busiest, and those of the sums, which are stored and read again."""
        work_tiles = pl.cdiv(rows, height) * pl.cdiv(columns, width) * splits
        steps_here = pl.cdiv(work_tiles, tiles.num_sms()) * pl.cdiv(steps, splits)
        sums = rows * columns * splits * (out_bytes if rounded else _SUM_BYTES) if splits > 1 else 0
        return steps_here * tiles.num_sms() * _stage_bytes(height, width) + _COST_OF_SUMS * sums

    most_splits = 1 if rows > _MOST_ROWS else min(steps, _MOST_SPLITS)
    choices = (
        (height, width, splits)
        for height in sorted(heights, reverse=True)
        for splits in range(1, most_splits + 1)
        for width in widths(splits)
    )
    block_rows, width, splits = min(choices, key=lambda choice: cost(*choice))
    shares = rows > block_rows and splits == 1 and tiles.interpret_params() is None and tiles.num_sms() % 2 == 0
    sizes = Fp8Tiles(
        block_rows=block_rows,
        block_columns=width,
        consumers=consumers,
        splits=splits,
        stages=1,
        cluster=2 if shares else 1,
    )
    staged = 2 * sizes.staged_rows * consumers * WGMMA_ROWS * out_bytes if splits == 1 or rounded else 0
    fixed = whole * depth + _MEETING_BYTES if whole_row else 0
    left = tiles.SHARED_MEMORY_BYTES - tiles.RESERVED_BYTES - staged - fixed
    return dataclasses.replace(
        sizes, whole_row=whole_row, stages=min(_MOST_STAGES, left // _stage_bytes(block_rows, width))
    )


def _stage_bytes(block_rows: int, block_columns: int) -> int:
    return (block_rows + block_columns) * BLOCK_DEPTH
