"""Sizes of the grouped product of few rows an expert: a stage, how many there are, who has which registers."""

import dataclasses
from typing import NamedTuple

from jattn_kernels.call import ExpertsCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.tile_sizes import rows_of_expert
from jattn_kernels.mxfp4 import GROUP

_MOST_TOKENS = 64
_ROWS_OF_EIGHT, _ROWS_OF_SIXTEEN = 3, 8  # that an expert may expect, of a tile's eight and sixteen
_GROUPS = (9, 7, 5)  # of a share of a stage: odd, so that threads read rows of it without waiting for each other
_CONSUMERS = 3
_MOST_STAGES = 18
_LEAST_STAGES = 6
_MOST_SPLITS = 3
_FREE = 2  # numbers that are left free behind a row's sums, so that threads read columns without waiting


class Registers(NamedTuple):
    """Of a thread, by what its warpgroup does."""

    consumer: int
    last: int
    producer: int


# As many as the launch gives, 96 a thread of five warpgroups.
_REGISTERS = Registers(consumer=120, last=80, producer=40)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewRowsSizes:
    """Sizes of one product.

    Attributes:
        rows: Of a work tile, at most.
        shares: Of a stage's depth, each of which has warps of its own.
        groups: Groups of 32 inputs of such a share.
        splits: Shares of the depth.
        consumers, stages: Consumer warpgroups; stages of shared memory, so many times a whole number.
        buffers: Of a unit's sums.
        registers: Of each kind of warpgroup.
    """

    rows: int
    shares: int
    groups: int
    splits: int
    consumers: int
    stages: int
    buffers: int
    registers: Registers

    @property
    def stage_groups(self) -> int:
        """Groups of a stage."""
        return self.shares * self.groups

    @property
    def rows_of_scales(self) -> int:
        """Rows of 64 scales that a stage has room for: each stage's begin where a copy may."""
        return tiles.aligned_rows(self.stage_groups, WGMMA_ROWS)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Rows that there is code for; a tile takes the first that is enough."""
        return tuple(range(TILED_ROWS, self.rows + 1, TILED_ROWS))

    @property
    def warps_of_row(self) -> int:
        """Warps that make a row float16: of a tile of few rows there are more than rows."""
        return 1 if self.rows > TILED_ROWS else WARPS

    @property
    def row_sums(self) -> int:
        """Room for a column's sums."""
        return self.rows + _FREE


def few_rows_sizes(call: ExpertsCall) -> tuple[FewRowsSizes, FewRowsSizes] | None:
    """Those of both products; None where another kernel has to do them."""
    if call.scales != "group" or call.num_tokens > _MOST_TOKENS:
        return None
    if call.num_tokens > TILED_ROWS and rows_of_expert(call) > _ROWS_OF_SIXTEEN:
        return None
    first, second = _sizes(call, depth=call.hidden_size), _sizes(call, depth=call.units)
    if first is None or second is None:
        return None
    if call.num_tokens > TILED_ROWS:  # whose sums, in float32, are more than what it gains
        return first, second
    work_tiles = min(call.num_tokens * call.per_token, call.num_experts)
    units, steps = work_tiles * (call.hidden_size // WGMMA_ROWS), call.units // GROUP // second.stage_groups
    return first, dataclasses.replace(second, splits=_fewest_splits(units, steps))


def _sizes(call: ExpertsCall, *, depth: int) -> FewRowsSizes | None:
    if depth < LEAST:
        return None
    is_of_eight = call.num_tokens <= TILED_ROWS or rows_of_expert(call) <= _ROWS_OF_EIGHT
    # Rows are read from shared memory for each 16 weights of 32 inputs, or each 32: of 16 rows that is too often.
    rows, shares, buffers = (TILED_ROWS, 1, 2) if is_of_eight else (2 * TILED_ROWS, 2, 1)
    sums = buffers * _CONSUMERS * WGMMA_ROWS * shares * (rows + _FREE) * 4
    left = tiles.SHARED_MEMORY_BYTES - tiles.RESERVED_BYTES - tiles.REDUCTION_BYTES - 2 * rows * depth - sums
    for groups in _GROUPS:
        of_stage = shares * groups
        stage = (of_stage * GROUP // 2 + tiles.aligned_rows(of_stage, WGMMA_ROWS)) * WGMMA_ROWS
        stages = min(_MOST_STAGES, left // stage) // _CONSUMERS * _CONSUMERS
        if depth % (of_stage * GROUP) == 0 and stages >= _LEAST_STAGES:
            break
    else:
        return None
    return FewRowsSizes(
        rows=rows,
        shares=shares,
        groups=groups,
        splits=1,
        consumers=_CONSUMERS,
        stages=stages,
        buffers=buffers,
        registers=_REGISTERS,
    )


def _fewest_splits(units: int, steps: int) -> int:
    """The fewest shares of the depth that make the longest share of an SM shortest."""

    def longest_share(splits: int) -> int:
        return -(-units * splits // tiles.num_sms()) * -(-steps // splits)

    return min(range(1, min(steps, _MOST_SPLITS) + 1), key=longest_share)
