"""The grouped product in Triton: rows of each expert times that expert's weights, all experts in one kernel.

program (work tile, block of columns, split of the inputs)
    for each stage of inputs:   rows from wherever they are, weights of the tile's expert -> acc
    the end                     bias, activation of the gate's columns and the other half's, and the tile's own rows out

A tile of rows that no row fills is cheap: what no row has is neither read nor stored. The tiles of one expert are
neighbours for some columns, then for the next ones, so that weights come from memory once.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float

from jattn_kernels.lowering.expert_groups import ProductOperands
from jattn_kernels.triton.experts.activation import Step, evaluate
from jattn_kernels.triton.experts.tile_sizes import ProductTiles
from jattn_kernels.triton.launch import launch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductConfig:
    """Constants of the grouped product.

    Attributes:
        num_experts, depth, width: Sizes of the weights; columns are the width.
        num_slots: Rows of the result, of each split.
        first_column, columns: Which columns the result has.
        block_rows, block_columns, block_depth, stages, together: Of `ProductTiles`; columns are the result's.
        splits: Parts of the inputs.
        steps: The activation, of two halves of the width; empty if there is none.
        gathers: Whether slots say which rows they are.
        has_bias: Whether it is given.
        float32: Whether products are of float32, which are not rounded to 19 bits.
    """

    num_experts: int
    depth: int
    width: int
    num_slots: int
    first_column: int
    columns: int
    block_rows: int
    block_columns: int
    block_depth: int
    stages: int
    together: int
    splits: int
    steps: tuple[Step, ...]
    gathers: bool
    has_bias: bool
    float32: bool

    @property
    def is_gated(self) -> bool:
        """Whether two halves make a result."""
        return len(self.steps) > 0

    @property
    def column_blocks(self) -> int:
        """Programs that have a row."""
        return -(-self.columns // self.block_columns)

    @property
    def split_depth(self) -> int:
        """Inputs of a split; the last may have none."""
        return -(-self.depth // (self.block_depth * self.splits)) * self.block_depth

    @property
    def whole_depth(self) -> bool:
        """Whether every stage is full."""
        return self.depth % self.block_depth == 0

    @property
    def precision(self) -> str:
        """Of products."""
        return "ieee" if self.float32 else "tf32"


def grouped_product(
    operands: ProductOperands,
    sizes: ProductTiles,
    *,
    num_slots: int,
    steps: tuple[Step, ...] = (),
    columns: slice | None = None,
    in_parts: bool = False,
) -> Float[Array, "*splits S C_out"]:
    """Each slot's row times its expert's weights; whatever memory held, in slots that no row has.

    Args:
        steps: The activation, if the result is that of both halves of the columns.
        columns: Which ones to compute, without an activation; None is all.
        in_parts: Whether the result is float32, one for each split, of which the sum is meant; else there is one split.
    """
    _, num_experts, depth, width = operands.kernel.shape
    columns = columns or slice(0, width // 2 if steps else width)
    config = ProductConfig(
        num_experts=num_experts,
        depth=depth,
        width=width,
        num_slots=num_slots,
        first_column=columns.start,
        columns=columns.stop - columns.start,
        block_rows=sizes.block_rows,
        block_columns=sizes.block_columns // 2 if steps else sizes.block_columns,
        block_depth=sizes.block_depth,
        stages=sizes.stages,
        together=sizes.together,
        splits=sizes.splits,
        steps=steps,
        gathers=operands.sources is not None,
        has_bias=operands.bias is not None,
        float32=operands.x.dtype == jnp.float32,
    )
    assert in_parts or sizes.splits == 1
    shape = (*((config.splits,) if in_parts else ()), config.num_slots, config.columns)
    (out,) = launch(
        multiply_rows,
        *operands,
        config=config,
        grid=operands.work.shape[0] * config.column_blocks * config.splits,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32 if in_parts else operands.x.dtype)],
        warps=sizes.warps,
    )
    return out


@triton.jit
@no_type_check
def multiply_rows(
    x_ptr,  # [X, K]
    source_ptr,  # int32 [S]: which row of x stands in a slot
    kernel_ptr,  # [L, E, K, C]
    bias_ptr,  # [L, E, C]
    layer_ptr,  # int32 [1]
    work_ptr,  # int32 [tiles, 3]: expert, first slot, rows
    count_ptr,  # int32 [1]: tiles that there are
    out_ptr,  # [splits, S, columns]
    C: tl.constexpr,  # ProductConfig
):
    ROWS: tl.constexpr = C.block_rows
    COLUMNS: tl.constexpr = C.block_columns
    split = tl.program_id(0) % C.splits
    number = tl.program_id(0) // C.splits
    num_tiles = tl.load(count_ptr)
    first_tile = number // (C.together * C.column_blocks) * C.together
    number = number % (C.together * C.column_blocks)
    together = tl.maximum(tl.minimum(num_tiles - first_tile, C.together), 1)
    block = number // together
    if (first_tile >= num_tiles) | (block >= C.column_blocks):
        return
    work = work_ptr + (first_tile + number % together) * 3
    layer = tl.load(layer_ptr).to(tl.int64)
    matrix = layer * C.num_experts + tl.load(work)
    row = tl.arange(0, ROWS)
    is_row = row < tl.load(work + 2)
    slot = tl.load(work + 1) + row
    source = slot
    if C.gathers:
        source = tl.load(source_ptr + slot, mask=is_row, other=0)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < C.columns
    w_column = C.first_column + column

    begin = split * C.split_depth
    end = tl.minimum(begin + C.split_depth, C.depth)
    inner = tl.arange(0, C.block_depth)
    x_at = x_ptr + source.to(tl.int64)[:, None] * C.depth + inner[None]
    w_rows = kernel_ptr + (matrix * C.depth + begin) * C.width
    w_at = inner[:, None] * C.width + w_column[None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = acc
    for start in tl.range(begin, end, C.block_depth, num_stages=C.stages):
        if C.whole_depth:
            x = tl.load(x_at + start, mask=is_row[:, None], other=0.0)
            is_weight = is_column[None]
        else:
            is_inner = start + inner < C.depth
            x = tl.load(x_at + start, mask=is_row[:, None] & is_inner[None], other=0.0)
            is_weight = is_inner[:, None] & is_column[None]
        acc = tl.dot(x, _load(w_rows + w_at, is_weight, C), acc, input_precision=C.precision)
        if C.is_gated:
            up = tl.dot(x, _load(w_rows + C.columns + w_at, is_weight, C), up, input_precision=C.precision)
        w_rows += C.block_depth * C.width

    if C.has_bias:  # of the first split alone
        is_biased = column < tl.where(split == 0, C.columns, 0)
        b_at = bias_ptr + matrix * C.width + w_column
        acc += tl.load(b_at, mask=is_biased, other=0.0).to(tl.float32)[None]
        if C.is_gated:
            up += tl.load(b_at + C.columns, mask=is_biased, other=0.0).to(tl.float32)[None]
    if C.is_gated:
        acc = evaluate(acc, up, C)
    out = out_ptr + (split.to(tl.int64) * C.num_slots + slot[:, None]) * C.columns + column[None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None])


@triton.jit
@no_type_check
def _load(at, is_weight, C: tl.constexpr):
    """Some weights; without a mask where all are."""
    if C.whole_depth and C.columns % C.block_columns == 0:
        return tl.load(at)
    return tl.load(at, mask=is_weight, other=0.0)
