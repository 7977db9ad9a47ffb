"""Sizes of the grouped product of few tokens: what a stage holds, how many there are, who has which registers."""

import dataclasses
from typing import NamedTuple

from jattn_kernels.call import ExpertsCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mxfp4 import GROUP

_MOST_TOKENS = 8
_ROWS = (4, 8)  # that a tile may have
_GROUPS = (9, 7, 5)  # of a stage: odd, so that threads read rows of it without waiting for each other
_CONSUMERS = 3
_MOST_STAGES = 18
_LEAST_STAGES = 6
_MOST_SPLITS = 3
_MOST_SUMS = 40  # registers of a stage's products, which are all under way at once


class Registers(NamedTuple):
    """Of a thread, by what its warpgroup does."""

    consumer: int
    rows: int
    producer: int


# As many as the launch gives, 96 a thread of five warpgroups.
_REGISTERS = Registers(consumer=112, rows=104, producer=40)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewRowsSizes:
    """Sizes of one product.

    Attributes:
        rows: Of a work tile, at most.
        groups: Groups of 32 inputs a stage.
        splits: Shares of the depth.
        consumers, stages: Consumer warpgroups; stages of shared memory, so many times a whole number.
        registers: Of each kind of warpgroup.
    """

    rows: int
    groups: int
    splits: int
    consumers: int
    stages: int
    registers: Registers

    @property
    def rows_of_scales(self) -> int:
        """Rows of 64 scales that a stage has room for: each stage's begin where a copy may."""
        return tiles.aligned_rows(self.groups, WGMMA_ROWS)


def rows_of_tile(call: ExpertsCall) -> int:
    """Rows that a work tile has at most: as many as there may be tokens."""
    return next(rows for rows in _ROWS if call.num_tokens <= rows)


def few_rows_sizes(call: ExpertsCall) -> tuple[FewRowsSizes, FewRowsSizes] | None:
    """Those of both products; None where another kernel has to do them."""
    if call.scales != "group" or call.num_tokens > _MOST_TOKENS:
        return None
    first = _sizes(call, depth=call.hidden_size, blocks=call.units * 2 // WGMMA_ROWS, may_split=False)
    second = _sizes(call, depth=call.units, blocks=call.hidden_size // WGMMA_ROWS, may_split=True)
    return None if first is None or second is None else (first, second)


def _sizes(call: ExpertsCall, *, depth: int, blocks: int, may_split: bool) -> FewRowsSizes | None:
    rows = rows_of_tile(call)
    fitting = [groups for groups in _GROUPS if groups * rows <= _MOST_SUMS and depth % (groups * GROUP) == 0]
    if not fitting or depth < LEAST:
        return None
    groups = fitting[0]
    fixed = 2 * 2 * rows * (depth + _CONSUMERS * WGMMA_ROWS * 4)
    left = tiles.SHARED_MEMORY_BYTES - tiles.RESERVED_BYTES - tiles.REDUCTION_BYTES - fixed
    stage = (groups * GROUP // 2 + tiles.aligned_rows(groups, WGMMA_ROWS)) * WGMMA_ROWS
    stages = min(_MOST_STAGES, left // stage) // _CONSUMERS * _CONSUMERS
    if stages < _LEAST_STAGES:
        return None
    work_tiles = min(call.num_tokens * call.per_token, call.num_experts)
    splits = _fewest_splits(work_tiles * blocks, depth // GROUP // groups) if may_split else 1
    return FewRowsSizes(
        rows=rows,
        groups=groups,
        splits=splits,
        consumers=_CONSUMERS,
        stages=stages,
        registers=_REGISTERS,
    )


def _fewest_splits(units: int, steps: int) -> int:
    """The fewest shares of the depth that make the longest share of an SM shortest."""

    def longest_share(splits: int) -> int:
        return -(-units * splits // tiles.num_sms()) * -(-steps // splits)

    return min(range(1, min(steps, _MOST_SPLITS) + 1), key=longest_share)
