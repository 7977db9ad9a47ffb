"""Root-mean-square norm in Triton: a program holds some whole rows in registers.

program (rows)      all is asked for before anything is summed: a step of few rows waits for memory once

How many rows and warps a program has is a matter of the columns alone, so that no row's sum depends on the others.
"""

import dataclasses
from typing import no_type_check

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float

from jattn_kernels.call import NormCall
from jattn_kernels.operands import NormOperands
from jattn_kernels.triton.launch import launch

_LEAST_NUMBERS = 1024  # of a program: narrow rows share one
_NUMBERS_PER_WARP = 512
_LEAST_WARPS, _MOST_WARPS = 4, 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Constants of the norm.

    Attributes:
        columns: Numbers of a row.
        block: Of registers.
        rows: Of a program.
        num_rows: Rows in all; 0 where they fill every program.
        eps, offset: What is added to the mean of squares, and to the scale.
    """

    columns: int
    block: int
    rows: int
    num_rows: int
    eps: float
    offset: float


def rms_norm(call: NormCall, operands: NormOperands) -> Float[Array, "T D"]:
    """Rows over their root mean square, times a layer's scale and an offset."""
    x, columns = operands.x, call.columns
    block = triton.next_power_of_2(columns)
    rows = max(_LEAST_NUMBERS // block, 1)
    config = NormConfig(
        columns=columns,
        block=block,
        rows=rows,
        num_rows=call.num_rows if call.num_rows % rows else 0,
        eps=float(call.eps),
        offset=float(call.offset),
    )
    (out,) = launch(
        norm_rows,
        x,
        operands.scale,
        operands.layer_index.reshape(1),
        config=config,
        grid=triton.cdiv(call.num_rows, rows),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        warps=min(max(block // _NUMBERS_PER_WARP, _LEAST_WARPS), _MOST_WARPS),
    )
    return out


@triton.jit
@no_type_check
def norm_rows(
    x_ptr,  # [T, D]
    scale_ptr,  # [L, D]
    layer_ptr,  # int32 [1]
    out_ptr,  # [T, D]
    C: tl.constexpr,  # NormConfig
):
    row = tl.program_id(0).to(tl.int64) * C.rows + tl.arange(0, C.rows)
    column = tl.arange(0, C.block)[None]
    inner = column < C.columns
    mask = inner
    if C.num_rows > 0:
        mask = inner & (row < C.num_rows)[:, None]
    at = row[:, None] * C.columns + column
    layer = tl.load(layer_ptr).to(tl.int64)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    # As many scales as numbers of x, each thread its own: one row of them would go through shared memory to the others.
    at_scale = tl.broadcast_to(layer * C.columns + column, [C.rows, C.block])
    scale = tl.load(scale_ptr + at_scale, mask=inner, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, axis=1, keep_dims=True) / C.columns
    out = x * tl.rsqrt(mean + C.eps) * (scale + C.offset)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)
