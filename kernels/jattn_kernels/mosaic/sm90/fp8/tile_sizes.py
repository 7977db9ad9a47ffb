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
_MEETING_BYTES = 1024
_ONE_CONSUMER = 16  # rows up to which a work tile has 64 columns: more of them share what they read of x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Tiles:
    """Sizes of a product's work tiles.

    Attributes:
        block_rows: Rows of x.
        consumers: Warpgroups that multiply; each has 64 columns of the result.
        splits: Of the depth; each one's sums stand by themselves.
        stages: Of the copies.
        cluster: Blocks that take neighbouring columns of the same rows, and share the copies of those.
        whole_row: Whether x is one row, all of it in shared memory all the time.
    """

    block_rows: int
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
    def block_columns(self) -> int:
        """Columns of the result."""
        return self.consumers * WGMMA_ROWS


def choose_tiles(*, rows: int, depth: int, columns: int, out_bytes: int, whole_row: bool = False) -> Fp8Tiles:
    """For prompts tiles of 128 x 256; for fewer rows what costs least, splits enough for all SMs among it."""
    whole = pl.cdiv(rows, TILED_ROWS) * TILED_ROWS
    heights = {min(whole, height) for height in ((_MOST_ROWS,) if rows > _MOST_ROWS else (_MOST_ROWS, _HALF))}
    consumers = 1 if whole <= _ONE_CONSUMER or columns % (2 * WGMMA_ROWS) else 2
    steps = pl.cdiv(depth, BLOCK_DEPTH)

    def cost(height: int, splits: int) -> int:
        """Bytes: as many from each SM as from the busiest, and those of the sums, which are stored and read again."""
        work_tiles = pl.cdiv(rows, height) * pl.cdiv(columns, consumers * WGMMA_ROWS) * splits
        steps_here = pl.cdiv(work_tiles, tiles.num_sms()) * pl.cdiv(steps, splits)
        sums = rows * columns * splits * _SUM_BYTES if splits > 1 else 0
        return steps_here * tiles.num_sms() * _stage_bytes(height, consumers) + _COST_OF_SUMS * sums

    most_splits = 1 if rows > _MOST_ROWS else min(steps, _MOST_SPLITS)
    choices = ((height, splits) for height in sorted(heights, reverse=True) for splits in range(1, most_splits + 1))
    block_rows, splits = min(choices, key=lambda choice: cost(*choice))
    shares = rows > block_rows and splits == 1 and tiles.interpret_params() is None and tiles.num_sms() % 2 == 0
    sizes = Fp8Tiles(block_rows=block_rows, consumers=consumers, splits=splits, stages=1, cluster=2 if shares else 1)
    staged = 2 * sizes.staged_rows * sizes.block_columns * out_bytes if splits == 1 else 0
    fixed = whole * depth + _MEETING_BYTES if whole_row else 0
    left = tiles.SHARED_MEMORY_BYTES - tiles.RESERVED_BYTES - staged - fixed
    return dataclasses.replace(
        sizes, whole_row=whole_row, stages=min(_MOST_STAGES, left // _stage_bytes(block_rows, consumers))
    )


def _stage_bytes(block_rows: int, consumers: int) -> int:
    return (block_rows + consumers * WGMMA_ROWS) * BLOCK_DEPTH
