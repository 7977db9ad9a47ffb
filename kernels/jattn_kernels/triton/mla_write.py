"""What ends a packed latent row, in one Triton kernel: the norm, the turn, a scale for each tile, the write of bytes.

program (token)     a row in registers, its compressed part by tiles; all is asked for before anything is written
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, UInt8

from jattn_kernels.call import AttentionCall
from jattn_kernels.operands import LatentRowOperands
from jattn_kernels.packed_latents import TILE, rotated_begin
from jattn_kernels.splits import Splits
from jattn_kernels.triton.fp8 import to_fp8
from jattn_kernels.triton.launch import launch

_WARPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentWriteConfig:
    """Constants of the kernel.

    Attributes:
        compressed, half: Numbers of the compressed part, and pairs of what turns.
        tile: Numbers that share a scale.
        splits, split: How many rows add up to one, and how far each lies from the next.
        num_slots: Of a layer, as far as an int32 tells them apart.
        row_bytes, rotated_begin: Of a row in the pages, and where its rotated part begins there.
        eps: Of the norm.
    """

    compressed: int
    half: int
    tile: int
    splits: int
    split: int
    num_slots: int
    row_bytes: int
    rotated_begin: int
    eps: float

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.compressed + 2 * self.half

    @property
    def tiles(self) -> int:
        """With a scale each."""
        return triton.cdiv(self.compressed, self.tile)

    @property
    def tile_block(self) -> int:
        """Registers for `tiles`."""
        return triton.next_power_of_2(self.tiles)

    @property
    def half_block(self) -> int:
        """Registers for `half`."""
        return triton.next_power_of_2(self.half)


def mla_write(
    call: AttentionCall, operands: LatentRowOperands
) -> tuple[Float[Array, "T W"], UInt8[Array, "*L P page_size bytes"]]:
    """The rows before they are packed, and the pages that have them at their slots."""
    latents, pages = operands.latents, operands.pages
    rows, num_tokens, width = latents.rows, latents.rows.shape[0], latents.width
    parts = (rows.parts if isinstance(rows, Splits) else rows[None])[..., latents.begin :]
    stacked = operands.layer_index is not None
    scale, scale_layer = latents.scales()
    *_, num_pages, page_size, row_bytes = pages.shape
    config = LatentWriteConfig(
        compressed=latents.compressed,
        half=(width - latents.compressed) // 2,
        tile=TILE,
        splits=parts.shape[0],
        split=parts.shape[1] * width,
        num_slots=min(num_pages * page_size, 2**31 - 1),
        row_bytes=row_bytes,
        rotated_begin=rotated_begin(latents.compressed),
        eps=float(latents.eps),
    )
    written, made = launch(
        write_packed_rows,
        parts,
        latents.cos,
        latents.sin,
        scale,
        scale_layer.reshape(1),
        operands.slots,
        jnp.asarray(operands.layer_index if stacked else 0, jnp.int32).reshape(1),
        config=config,
        grid=num_tokens,
        in_place=[pages],
        out_type=[jax.ShapeDtypeStruct((num_tokens, width), latents.dtype)],
        warps=_WARPS,
    )
    return made, written


@triton.jit
@no_type_check
def write_packed_rows(
    rows_ptr,  # [splits, rows, W]
    cos_ptr,  # float32 [T, half]
    sin_ptr,
    scale_ptr,  # [L, C]
    scale_layer_ptr,  # int32 [1]
    slot_ptr,  # int32 [T]
    layer_ptr,  # int32 [1]
    pages_ptr,  # bytes
    made_ptr,  # [T, W]
    C: tl.constexpr,  # LatentWriteConfig
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    layer = tl.load(layer_ptr).to(tl.int64)
    scale_ptr += tl.load(scale_layer_ptr).to(tl.int64) * C.compressed
    source = rows_ptr + token * C.width
    made = made_ptr + token * C.width

    tile = tl.arange(0, C.tile_block)
    column = tile[:, None] * C.tile + tl.arange(0, C.tile)[None]
    is_column = column < C.compressed
    pair = tl.arange(0, C.half_block)
    is_pair = pair < C.half
    numbers = _sum(source + column, is_column, made, C)
    first = _sum(source + C.compressed + pair, is_pair, made, C)
    second = _sum(source + C.compressed + C.half + pair, is_pair, made, C)
    factor = tl.load(scale_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * C.half + pair, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + token * C.half + pair, mask=is_pair, other=0.0)

    mean = tl.sum(tl.sum(numbers * numbers, axis=1), axis=0) / C.compressed
    normed = (numbers * tl.rsqrt(mean + C.eps) * factor).to(made.dtype.element_ty)
    low = (first * cos - second * sin).to(made.dtype.element_ty)
    high = (second * cos + first * sin).to(made.dtype.element_ty)
    tl.store(made + column, normed, mask=is_column)
    tl.store(made + C.compressed + pair, low, mask=is_pair)
    tl.store(made + C.compressed + C.half + pair, high, mask=is_pair)

    # As `packed_latents.scales_of`: the least power of two, by the exponent's bits.
    normed = normed.to(tl.float32)
    bits = tl.max(tl.abs(normed), axis=1).to(tl.int32, bitcast=True)
    bits = ((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    bits = tl.minimum(tl.maximum(bits, 1 << 23), 246 << 23)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    stored = to_fp8(normed * inverse[:, None], "e4m3")

    is_written = (slot >= 0) & (slot < C.num_slots)
    target = pages_ptr + (layer * C.num_slots + slot) * C.row_bytes
    tl.store(target + column, stored, mask=is_written & is_column)
    scales = (target + C.compressed).to(tl.pointer_type(tl.int32))
    tl.store(scales + tile, bits, mask=is_written & (tile < C.tiles))
    rotated = (target + C.rotated_begin).to(tl.pointer_type(tl.bfloat16))
    tl.store(rotated + pair, low.to(tl.bfloat16), mask=is_written & is_pair)
    tl.store(rotated + C.half + pair, high.to(tl.bfloat16), mask=is_written & is_pair)


@triton.jit
@no_type_check
def _sum(at, mask, made, C: tl.constexpr):
    """What splits add up to, rounded as rows are, in float32."""
    SPLITS: tl.constexpr = C.splits
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(at + part * C.split, mask=mask, other=0.0).to(tl.float32)
    return total.to(made.dtype.element_ty).to(tl.float32)
