"""Sizes of the grouped product's work tiles, by how many rows an expert has to expect."""

import dataclasses

from jattn_kernels.call import ExpertsCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS

_ROW_COUNTS = (8, 16, 32, 64)
_ROWS_OF_PROMPTS = 24  # an expert: from here on tensor cores are what is waited for, not memory
_MOST_ROWS_IN_4_BITS = 64  # whose sums leave registers for the weights
_MOST_STAGES = 10  # of weights of few bits: more do not make copies arrive earlier


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductTiles:
    """Sizes of a work tile.

    Attributes:
        block_rows: Rows at most.
        row_counts: Rows that there is code for, ascending up to `block_rows`; a tile takes the first that is enough.
        consumers: Consumer warpgroups; each has 64 columns of both blocks.
        stages: Stages of shared memory.
        lag: Stages that the copies of rows may be behind those of weights.
    """

    block_rows: int
    row_counts: tuple[int, ...]
    consumers: int
    stages: int
    lag: int


def product_tiles(call: ExpertsCall) -> ProductTiles:
    """The sizes for both of an expert's products."""
    rows = call.num_tokens * call.per_token / min(call.num_experts, call.num_tokens * call.per_token)
    if rows >= _ROWS_OF_PROMPTS and call.num_tokens > _ROW_COUNTS[-1]:
        return ProductTiles(block_rows=128, row_counts=(32, 64, 96, 128), consumers=2, stages=4, lag=2)
    block_rows = next((count for count in _ROW_COUNTS if call.num_tokens <= count), _ROW_COUNTS[-1])
    row_counts = tuple(count for count in _ROW_COUNTS if count <= block_rows)
    return ProductTiles(block_rows=block_rows, row_counts=row_counts, consumers=1, stages=8, lag=3)


def few_bits_tiles(call: ExpertsCall) -> ProductTiles:
    """The sizes for weights of 8 or 4 bits; as many stages as fit."""
    sizes, in_4_bits = product_tiles(call), call.scales == "group"
    counts = sizes.row_counts
    if in_4_bits:  # one consumer makes weights wider while the other multiplies
        counts = tuple(sorted({min(count, _MOST_ROWS_IN_4_BITS) for count in counts}))
        sizes = dataclasses.replace(sizes, consumers=2)
    elif sizes.block_rows > _ROW_COUNTS[-1]:
        counts = counts[:-1]
    sizes = dataclasses.replace(sizes, block_rows=counts[-1], row_counts=counts)
    depth, column_bytes = (160, 80 + 5) if in_4_bits else (128, 128)
    stage = 2 * (sizes.consumers * WGMMA_ROWS * column_bytes + sizes.block_rows * depth)
    out = sizes.consumers * sizes.block_rows * WGMMA_ROWS * 2
    left = tiles.SHARED_MEMORY_BYTES - tiles.RESERVED_BYTES - tiles.REDUCTION_BYTES - out
    return dataclasses.replace(sizes, stages=min(_MOST_STAGES, left // stage), lag=0)
