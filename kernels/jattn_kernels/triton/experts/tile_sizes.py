"""Tile sizes of the grouped products, by the rows that an expert has to expect and by what a GPU holds."""

import dataclasses

from jattn_kernels.call import ExpertsCall
from jattn_kernels.triton.gpus import SHARED_MEMORY, num_sms

_BLOCK_ROWS = ((8, 16), (24, 32), (255, 64))  # up to so many rows an expert, tiles of so many
_MOST_BLOCK_ROWS = 128
_STREAMED_ROWS = 32  # up to here memory is what is waited for
_STREAMED_BYTES = 16 * 1024  # of weights a stage; products of float32 are unrolled, and of fewer inputs
_LEAST_SPLIT = 512  # inputs of a split
_MOST_SPLITS = 8
_STAGES, _STAGES_OF_SMALL = 4, 3
_SMALL = 128 * 1024  # shared memory of GPUs on which two programs an SM are worth more than a stage
_TOGETHER = 1024  # rows whose blocks of columns are computed side by side, so that their weights are read once


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductTiles:
    """Sizes of a work tile of one of an expert's products.

    Attributes:
        block_rows: Rows at most; of both products the same.
        block_columns: Columns of the weights, the gate's and the other half's both counted.
        block_depth: Inputs of a stage.
        stages: Stages of shared memory.
        warps: Of a program.
        splits: Into how many parts the inputs are cut, each with programs of its own.
        together: Work tiles whose blocks of columns are neighbours.
    """

    block_rows: int
    block_columns: int
    block_depth: int
    stages: int
    warps: int
    splits: int
    together: int


def rows_of_tile(call: ExpertsCall) -> int:
    """Rows of a work tile: enough for most experts' rows, so that few experts are read twice."""
    rows = call.num_tokens * call.per_token
    expected = rows / _met_experts(call)
    return next((block for most, block in _BLOCK_ROWS if expected <= most), _MOST_BLOCK_ROWS)


def product_tiles(call: ExpertsCall, *, depth: int, columns: int) -> ProductTiles:
    """The sizes of a product; of a device that is no NVIDIA GPU, those of compute capability 8.0.

    They depend on the number of tokens, not on where those go: a token's result is the same to the bit whatever its
    neighbours are, in all calls of as many tokens.

    Args:
        depth: Inputs.
        columns: Of the weights.
    """
    block_rows, wide = rows_of_tile(call), call.kernel_dtype == "float32"
    itemsize = 4 if wide else 2
    if block_rows <= _STREAMED_ROWS:
        tiles, wanted = _met_experts(call), num_sms(call.device)
        block_columns = 64 if wide or tiles * -(-columns // 128) < wanted else 128
        block_depth, warps, together = 32 if wide else _STREAMED_BYTES // itemsize // block_columns, 4, 1
        splits = _splits(tiles * -(-columns // block_columns), wanted, depth)
    else:
        large = block_rows == _MOST_BLOCK_ROWS
        block_columns = 64 if wide else 256 if large and _has_wide_products(call) else 128
        block_depth, warps, together = 32 if wide else 64, 8 if large else 4, _TOGETHER // block_rows
        splits = 1
    stage_bytes = (block_rows + block_columns) * block_depth * itemsize
    most_stages = _STAGES if block_rows <= _STREAMED_ROWS or _shared_memory(call) > _SMALL else _STAGES_OF_SMALL
    return ProductTiles(
        block_rows=block_rows,
        block_columns=block_columns,
        block_depth=block_depth,
        stages=min(_shared_memory(call) // stage_bytes, most_stages),
        warps=warps,
        splits=splits,
        together=together,
    )


def _splits(programs: int, wanted: int, depth: int) -> int:
    """Parts of the inputs, where columns alone give too few programs to keep the memory busy."""
    splits = 1
    while splits < _MOST_SPLITS and programs * splits < wanted and depth >= 2 * splits * _LEAST_SPLIT:
        splits *= 2
    return splits


def _has_wide_products(call: ExpertsCall) -> bool:
    """Whether tensor cores read both operands from shared memory, so that registers hold 128 x 256 sums."""
    return call.device.compute_capability in ((9, 0), (10, 0))


def _met_experts(call: ExpertsCall) -> int:
    """Experts that some row goes to, at most."""
    return min(call.num_experts, call.num_tokens * call.per_token)


def _shared_memory(call: ExpertsCall) -> int:
    return SHARED_MEMORY[call.device.compute_capability or (8, 0)]
