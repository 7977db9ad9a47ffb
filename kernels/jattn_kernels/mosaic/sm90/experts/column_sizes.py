"""Sizes of the grouped product of few rows that reads whole columns: a stage, how many there are, registers."""

import dataclasses
from typing import NamedTuple

from jattn_kernels.call import ExpertsCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import COPY_ALIGNMENT, TILED_ROWS, WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.tile_sizes import rows_of_expert
from jattn_kernels.mxfp4 import GROUP
from jattn_kernels.quantized import NUMBERS_OF_BYTE

COLUMNS = 16  # of a unit: of one product of a warp
SCALED_UNITS = WGMMA_ROWS // COLUMNS  # whose scales are copied together
_MOST_TOKENS = 64
_ROWS_OF_EIGHT, _ROWS_OF_SIXTEEN = 3, 8  # that an expert may expect, of a tile's eight and sixteen
_MOST_DEPTH = 4096  # more would not be held in registers
_CONSUMERS = 3
_LEAST_STAGES, _MOST_STAGES = 3, 9
_FREE = 2  # numbers that are left free behind a row's sums, so that threads store columns without waiting


class Registers(NamedTuple):
    """Of a thread, by what its warpgroup does."""

    consumer: int
    last: int
    producer: int


_REGISTERS = Registers(consumer=128, last=64, producer=32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnSizes:
    """Sizes of one product.

    Attributes:
        rows: Of a work tile, at most.
        depth: Inputs.
        consumers, stages: Consumer warpgroups; stages of shared memory, a unit each.
        buffers: Of a unit's sums.
        scale_buffers: Of the scales of `SCALED_UNITS` units.
        registers: Of each kind of warpgroup.
    """

    rows: int
    depth: int
    consumers: int = _CONSUMERS
    stages: int
    buffers: int = 2
    scale_buffers: int = 3
    registers: Registers = _REGISTERS

    @property
    def groups(self) -> int:
        """Groups of 32 inputs."""
        return self.depth // GROUP

    @property
    def warps(self) -> int:
        """That share the depth."""
        return self.consumers * WARPS

    @property
    def warp_groups(self) -> int:
        """Groups of a warp, at most."""
        return -(-self.groups // self.warps)

    @property
    def lines(self) -> int:
        """Of 128 bytes, that a unit's columns are."""
        return COLUMNS * self.depth // NUMBERS_OF_BYTE // COPY_ALIGNMENT

    @property
    def rows_of_scales(self) -> int:
        """Rows of 64 scales that a buffer has room for: each begins where a copy may."""
        return tiles.aligned_rows(self.groups, WGMMA_ROWS)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Rows that there is code for; a tile takes the first that is enough."""
        return tuple(range(TILED_ROWS, self.rows + 1, TILED_ROWS))

    @property
    def row_sums(self) -> int:
        """Room for a column's sums."""
        return self.rows + _FREE


def column_sizes(call: ExpertsCall) -> tuple[ColumnSizes, ColumnSizes] | None:
    """Those of both products; None where another kernel has to do them."""
    if call.scales != "group" or call.num_tokens > _MOST_TOKENS:
        return None
    if call.num_tokens > TILED_ROWS and rows_of_expert(call) > _ROWS_OF_SIXTEEN:
        return None
    is_of_eight = call.num_tokens <= TILED_ROWS or rows_of_expert(call) <= _ROWS_OF_EIGHT
    rows = TILED_ROWS if is_of_eight else 2 * TILED_ROWS
    first, second = (_sizes(rows, depth) for depth in (call.hidden_size, call.units))
    return None if first is None or second is None else (first, second)


def _sizes(rows: int, depth: int) -> ColumnSizes | None:
    if depth > _MOST_DEPTH:
        return None
    sizes = ColumnSizes(rows=rows, depth=depth, stages=1)
    left = tiles.SHARED_MEMORY_BYTES - tiles.RESERVED_BYTES - tiles.REDUCTION_BYTES
    left -= sizes.buffers * sizes.warps * COLUMNS * sizes.row_sums * 4
    left -= sizes.scale_buffers * sizes.rows_of_scales * WGMMA_ROWS + sizes.warps * rows * 4
    stages = min(_MOST_STAGES, left // (sizes.lines * COPY_ALIGNMENT))
    return None if stages < _LEAST_STAGES else dataclasses.replace(sizes, stages=stages)
