"""Sizes of the kernel of one token and weights in mxfp4: a stage, how many there are, who has which registers."""

import dataclasses

from jattn_kernels.call import ExpertsCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.row_pieces import LEAST
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.column_sizes import Registers
from jattn_kernels.mxfp4 import GROUP

_GROUPS = (9, 7, 5)  # of a stage: odd, so that threads read rows of it without waiting for each other
_CONSUMERS = 3
_MOST_STAGES = 18
_LEAST_STAGES = 6
_BUFFERS = 2  # of a unit's sums
_FREE = 2  # numbers that are left free behind a row's sums, so that threads read columns without waiting


# As many as the launch gives, 96 a thread of five warpgroups.
_REGISTERS = Registers(consumer=120, last=80, producer=40)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneTokenSizes:
    """Sizes of both products.

    Attributes:
        rows: A choice each, at most.
        groups: Groups of 32 inputs of a stage.
        consumers, stages: Consumer warpgroups; stages of shared memory, so many times a whole number.
        registers: Of each kind of warpgroup.
    """

    rows: int = TILED_ROWS
    groups: int
    consumers: int = _CONSUMERS
    stages: int
    registers: Registers = _REGISTERS

    @property
    def rows_of_scales(self) -> int:
        """Rows of 64 scales that a stage has room for: each stage's begin where a copy may."""
        return tiles.aligned_rows(self.groups, WGMMA_ROWS)

    @property
    def row_sums(self) -> int:
        """Room for a column's sums."""
        return self.rows + _FREE


def one_token_sizes(call: ExpertsCall) -> OneTokenSizes | None:
    """None where another kernel has to do them."""
    depth = call.hidden_size
    if call.scales != "group" or call.num_tokens > 1 or depth < LEAST:
        return None
    sums = _BUFFERS * _CONSUMERS * WGMMA_ROWS * (TILED_ROWS + _FREE) * 4
    left = tiles.SHARED_MEMORY_BYTES - tiles.RESERVED_BYTES - tiles.REDUCTION_BYTES - 2 * TILED_ROWS * depth - sums
    for groups in _GROUPS:
        stage = (groups * GROUP // 2 + tiles.aligned_rows(groups, WGMMA_ROWS)) * WGMMA_ROWS
        stages = min(_MOST_STAGES, left // stage) // _CONSUMERS * _CONSUMERS
        if depth % (groups * GROUP) == 0 and stages >= _LEAST_STAGES:
            return OneTokenSizes(groups=groups, stages=stages)
    return None
