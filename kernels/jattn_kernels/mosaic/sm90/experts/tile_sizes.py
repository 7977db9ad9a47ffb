"""Sizes of the grouped product's work tiles, by how many rows an expert has to expect."""

import dataclasses

from jattn_kernels.call import ExpertsCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS

_ROW_COUNTS = (8, 16, 32, 64)
_ROWS_OF_PROMPTS = 24  # an expert: from here on tensor cores are what is waited for, not memory
_MOST_ROWS_IN_4_BITS = 64  # whose sums leave registers for the weights
_FEW_TOKENS, _MOST_ROWS_OF_FEW = 64, 32  # up to so many tokens, where their experts expect half as many rows or less
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


def rows_of_expert(call: ExpertsCall) -> float:
    """That an expert has to expect, if each is as likely."""
    choices = call.num_tokens * call.per_token
    return choices / min(call.num_experts, choices)


def product_tiles(call: ExpertsCall) -> ProductTiles:
    """The sizes for both of an expert's products."""
    rows = rows_of_expert(call)
    if rows >= _ROWS_OF_PROMPTS and call.num_tokens > _ROW_COUNTS[-1]:
        return ProductTiles(block_rows=128, row_counts=(32, 64, 96, 128), consumers=2, stages=4, lag=2)
    block_rows = next((count for count in _ROW_COUNTS if call.num_tokens <= count), _ROW_COUNTS[-1])
    row_counts = tuple(count for count in _ROW_COUNTS if count <= block_rows)
    return ProductTiles(block_rows=block_rows, row_counts=row_counts, consumers=1, stages=8, lag=3)


def few_bits_tiles(call: ExpertsCall) -> ProductTiles:
    """The sizes for weights of 8 or 4 bits; as many stages as fit.

    Of few tokens a tile has room for few rows, which leaves it to weights on their way: an expert that more go to has
    its weights read again.
    """
    sizes, in_4_bits = product_tiles(call), call.scales == "group"
    counts, consumers = sizes.row_counts, sizes.consumers
    if in_4_bits:
        counts = tuple(sorted({min(count, _MOST_ROWS_IN_4_BITS) for count in counts}))
        consumers = 2  # one makes weights wider while the other multiplies
    elif sizes.block_rows > _ROW_COUNTS[-1]:
        counts = counts[:-1]
    if _ROW_COUNTS[0] < call.num_tokens <= _FEW_TOKENS and rows_of_expert(call) <= _MOST_ROWS_OF_FEW / 2:
        counts = tuple(count for count in counts if count <= _MOST_ROWS_OF_FEW)
        consumers = 3 if in_4_bits else 2
    return _with_stages(sizes, counts, consumers, in_4_bits=in_4_bits)


def _with_stages(sizes: ProductTiles, counts: tuple[int, ...], consumers: int, *, in_4_bits: bool) -> ProductTiles:
    """The same with so many rows at most and consumers, and what stages fit beside them."""
    side, block_rows = consumers * WGMMA_ROWS, counts[-1]
    depth, column_bytes = (160, 80 + rows_of_scales(side)) if in_4_bits else (128, 128)
    stage = 2 * (side * column_bytes + block_rows * depth)
    out = side * block_rows * 2
    left = tiles.SHARED_MEMORY_BYTES - tiles.RESERVED_BYTES - tiles.REDUCTION_BYTES - out
    return dataclasses.replace(
        sizes,
        block_rows=block_rows,
        row_counts=counts,
        consumers=consumers,
        stages=min(_MOST_STAGES, left // stage),
        lag=0,
    )


def rows_of_scales(side: int) -> int:
    """Rows of so many scales that a stage of weights of 4 bits has room for: each part's begin where a copy may."""
    return tiles.aligned_rows(5, side)
