"""How a product with weights of 4 bits is cut into work tiles."""

import dataclasses

import jax.experimental.pallas as pl

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS

PART_DEPTH = 128  # inputs whose weights are made wider at a time; a stage has one such part or two
_WHOLE_LINE = 256  # inputs of 128 bytes: what memory brings at once
_MOST_ROWS = 128  # of a work tile: more of them and their sums do not fit the registers beside the weights
ROWS_OF_LINES = 16  # up to which that is so; of 64 it is where there are stages enough, with others it was not timed
_STAGES_ENOUGH = 3  # with two of 256 inputs 24.4 us where five of 128 take 23.4
# Of a work tile: what it takes beside them, as many steps. On an H200 [1, 4096] x [4096, 6144] takes 15.8 us in 4
# splits, a tile of 4 steps an SM, and 19.8 in 16, 3 tiles of one step.
_STEPS_MORE = 1
_FEW_ROWS = 64  # up to which there are four consumers, and tiles that give each SM as many columns
_LEAST_WIDTH, _WIDTHS = 128, 32  # of such tiles, the least and what they differ by
_UNEVEN = 1.1  # columns of as many work tiles for each SM over those there are, up to which one row is gated
_MOST_SPLITS = 16
_MOST_STAGES = 12
_ITEM_BYTES, _SCALE_BYTES = 2, 4
_MEETING_BYTES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4Tiles:
    """Sizes of a product's work tiles.

    Attributes:
        block_rows: Rows of x.
        block_columns: Columns of the result, a multiple of 32.
        consumers: Warpgroups that multiply, each 64 of these columns; the last two may have 32 in common.
        splits: Of the depth; each one's sums stand by themselves.
        stages: Of the copies.
        block_depth: Inputs of a stage.
        whole_row: Whether x is one row, all of it in shared memory all the time.
        takers: Consumers of the same columns, each of which takes every so many-th stage.
        halves: 2 where a work tile has as many columns of either half, which are a gate and what it gates; else 1.
    """

    block_rows: int
    block_columns: int
    consumers: int
    splits: int
    stages: int
    block_depth: int = PART_DEPTH
    whole_row: bool = False
    takers: int = 1
    halves: int = 1

    @property
    def strips(self) -> int:
        """Of 64 columns of the result, in a work tile."""
        return self.consumers // self.takers

    @property
    def half_columns(self) -> int:
        """Of a half, in a work tile."""
        return self.block_columns // self.halves

    @property
    def half_strips(self) -> int:
        """Likewise."""
        return self.strips // self.halves


def gated_widths(rows: int, columns: int) -> list[int]:
    """Columns that a work tile may have of both halves together, of a product with so many.

    None but of one row, where SMs have as many of them, and of a whole tile of 64 rows: of 256 such a product takes as
    much longer as its activation does by itself, and others were not timed.
    """
    if rows != 1 and pl.cdiv(rows, TILED_ROWS) * TILED_ROWS != _FEW_ROWS:
        return []
    widths = [width for width in range(2 * WGMMA_ROWS, 4 * WGMMA_ROWS + 1, _WIDTHS) if columns % width == 0]
    if rows > 1:
        return widths
    sms = tiles.num_sms()
    return [width for width in widths if pl.cdiv(columns // width, sms) * sms * width <= _UNEVEN * columns]


def choose_tiles(
    *,
    rows: int,
    depth: int,
    columns: int,
    groups: int,
    zero_points: bool = False,
    sum_bytes: int = 4,
    whole_row: bool = False,
    halves: int = 1,
) -> Int4Tiles:
    """As many rows in a work tile as there are, and splits enough for all SMs.

    Args:
        zero_points: Whether groups have some; they lie beside the scales.
        sum_bytes: Of a sum that is stored; those of two are staged in shared memory.
        halves: Of the columns; of two there is one split.
    """
    block_rows = min(pl.cdiv(rows, TILED_ROWS) * TILED_ROWS, _MOST_ROWS)
    most = 4 if block_rows <= _FEW_ROWS else 2
    takers = most if rows == 1 and halves == 1 else 1  # timed with no more rows
    takes_lines = block_rows <= ROWS_OF_LINES and _divides(_WHOLE_LINE, depth, depth // groups)
    block_depth = _WHOLE_LINE if takes_lines else PART_DEPTH
    groups_of_stage = pl.cdiv(groups * block_depth, depth)
    of_column = block_depth // 2 + groups_of_stage * _SCALE_BYTES
    steps, sms = pl.cdiv(depth, block_depth), tiles.num_sms()

    def stage(width: int) -> int:
        return (0 if whole_row else block_rows * block_depth * _ITEM_BYTES) + width * of_column

    def padding(width: int) -> int:
        """Bytes of a stage beside these: zero points, and rows behind which a copy may begin."""
        rows_of = [(size, tiles.aligned_rows(groups_of_stage, width // halves * size)) for size in (2, 4)]
        scales = max(size * rows for size, rows in rows_of) - groups_of_stage * _SCALE_BYTES
        return width * (scales + (tiles.aligned_rows(groups_of_stage, width // halves) if zero_points else 0))

    def bytes_of_all(width: int, splits: int) -> int:
        steps_of_tile = pl.cdiv(steps, splits) + (_STEPS_MORE if takes_lines else 0)
        work_tiles = pl.cdiv(rows, block_rows) * pl.cdiv(columns, width) * splits
        return pl.cdiv(work_tiles, sms) * steps_of_tile * sms * stage(width) + 2 * splits * rows * columns * sum_bytes

    widths = [strips * WGMMA_ROWS for strips in (4, 2, 1) if strips * takers <= most]
    widths = [next(width for width in widths if columns % width == 0)]
    if sum_bytes == _ITEM_BYTES and block_rows <= _FEW_ROWS:
        widths += [width for width in range(_LEAST_WIDTH, 4 * WGMMA_ROWS, _WIDTHS) if columns % width == 0]
    most_splits = min(steps, _MOST_SPLITS)
    if halves > 1:
        widths, most_splits = gated_widths(rows, columns), 1
    choices = ((width, splits) for width in widths for splits in range(1, most_splits + 1))
    width, splits = min(choices, key=lambda choice: bytes_of_all(*choice))
    fixed = block_rows * depth * _ITEM_BYTES + _MEETING_BYTES if whole_row else 0
    fixed += (takers - 1) * width * block_rows * _SCALE_BYTES
    strips = halves * pl.cdiv(width // halves, WGMMA_ROWS)
    fixed += strips * WGMMA_ROWS * block_rows * sum_bytes if sum_bytes == _ITEM_BYTES else 0
    room = tiles.SHARED_MEMORY_BYTES - tiles.RESERVED_BYTES - fixed
    stages = min(_MOST_STAGES, room // (stage(width) + padding(width)))
    fits = stages >= 2 * _STAGES_ENOUGH and splits * _WHOLE_LINE <= depth
    fits = fits and depth // groups >= PART_DEPTH and _divides(_WHOLE_LINE, depth, depth // groups)
    spills = zero_points and halves > 1  # registers, where a stage has two parts
    if fits and block_rows == _FEW_ROWS and sum_bytes == _ITEM_BYTES and not spills:
        block_depth, stages = _WHOLE_LINE, stages // 2
    return Int4Tiles(
        block_rows=block_rows,
        block_columns=width,
        consumers=strips * takers,
        splits=splits,
        stages=stages // takers * takers,
        block_depth=block_depth,
        whole_row=whole_row,
        takers=takers,
        halves=halves,
    )


def _divides(block_depth: int, depth: int, group_size: int) -> bool:
    """Whether stages of so many inputs end where the depth does, and none has parts of more groups than one."""
    return depth % block_depth == 0 and (block_depth % group_size == 0 or group_size % block_depth == 0)
