"""Rotary embedding and the write of keys and values into their pages, in one Triton kernel.

program (token, block of heads)     heads of one kind: queries, turned, go out; keys, turned, and values as they are go
                                    to the token's place in the pages

A step of few tokens waits for one round trip to memory: a program asks for all it needs before it writes, and nothing
that is loaded hangs on the slot. Of many tokens a program takes more heads.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float

from jattn_kernels.call import AttentionCall
from jattn_kernels.operands import RotaryOperands
from jattn_kernels.splits import added
from jattn_kernels.triton.attention.config import Strides, page_strides
from jattn_kernels.triton.fp8 import NAMES, to_fp8
from jattn_kernels.triton.gpus import num_sms
from jattn_kernels.triton.launch import launch

# Numbers of a program, and its warps: of few programs, and of more than run at a time.
_SMALL, _LARGE = (1024, 2), (4096, 4)
_PROGRAMS_PER_SM = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Constants of the kernel.

    Attributes:
        num_q_heads, num_kv_heads, head_dim: Sizes.
        half: Pairs of a head that are turned.
        at_once: Heads of a program, a power of two.
        num_slots, page_size: Of a layer; slots as far as an int32 tells them apart.
        row: Where a row lies in either array of pages.
        fp8: How numbers become bytes in the pages; "" if they stay numbers.
        normed, scaled: Whether queries and keys are normed first, and whether norms have scales.
        eps, offset: Of the norms.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    half: int
    at_once: int
    num_slots: int
    page_size: int
    row: Strides
    fp8: str
    normed: bool
    scaled: bool
    eps: float
    offset: float

    @property
    def num_heads(self) -> int:
        """Of a token's row."""
        return self.num_q_heads + 2 * self.num_kv_heads

    @property
    def q_blocks(self) -> int:
        """Programs of a token's queries."""
        return triton.cdiv(self.num_q_heads, self.at_once)

    @property
    def kv_blocks(self) -> int:
        """Of its keys, and of its values."""
        return triton.cdiv(self.num_kv_heads, self.at_once)

    @property
    def blocks(self) -> int:
        """Programs of a token."""
        return self.q_blocks + 2 * self.kv_blocks

    @property
    def rest(self) -> int:
        """Numbers of a head past its pairs."""
        return self.head_dim - 2 * self.half

    @property
    def half_block(self) -> int:
        """Registers for `half`."""
        return triton.next_power_of_2(max(self.half, 1))

    @property
    def rest_block(self) -> int:
        """Registers for `rest`."""
        return triton.next_power_of_2(max(self.rest, 1))


def rotate_and_write(
    call: AttentionCall, operands: RotaryOperands
) -> tuple[Float[Array, "T N H"], Float[Array, "..."], Float[Array, "..."]]:
    """Turned queries, and the pages with the turned keys and the values."""
    spec, qkv, k_pages = call.spec, added(operands.qkv), operands.k_pages
    num_tokens, num_heads, head_dim = qkv.shape
    stacked = operands.layer_index is not None
    numbers, warps = _SMALL
    if num_tokens * num_heads * head_dim > _PROGRAMS_PER_SM * num_sms(call.device) * numbers:
        numbers, warps = _LARGE
    at_once = max(numbers // triton.next_power_of_2(head_dim), 1)
    assert call.page_size is not None
    norms = operands.norms
    scales = None if norms is None else norms.scales()
    q_scale, k_scale, norm_layer = (None, None, None) if scales is None else (*scales[:2], scales[2].reshape(1))
    config = RotaryConfig(
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=head_dim,
        half=operands.cos.shape[-1],
        at_once=min(at_once, triton.next_power_of_2(max(spec.num_q_heads, spec.num_kv_heads))),
        num_slots=min(k_pages.shape[1 if stacked else 0] * call.page_size, 2**31 - 1),
        page_size=call.page_size,
        row=page_strides(k_pages.shape, spec, stacked=stacked, kv_index=0),
        fp8=NAMES.get(call.kv_dtype, ""),
        normed=norms is not None,
        scaled=scales is not None,
        eps=0.0 if norms is None else norms.eps,
        offset=0.0 if norms is None else norms.offset,
    )
    pages = (k_pages, operands.v_pages)
    *written, q = launch(
        rotate_and_write_heads,
        qkv,
        operands.cos,
        operands.sin,
        operands.slots,
        jnp.asarray(operands.layer_index if stacked else 0, jnp.int32).reshape(1),
        q_scale,
        k_scale,
        norm_layer,
        config=config,
        grid=num_tokens * config.blocks,
        in_place=[jax.lax.bitcast_convert_type(each, jnp.uint8) for each in pages] if config.fp8 else pages,
        out_type=[jax.ShapeDtypeStruct((num_tokens, spec.num_q_heads, head_dim), qkv.dtype)],
        warps=warps,
    )
    if config.fp8:
        written = [jax.lax.bitcast_convert_type(each, k_pages.dtype) for each in written]
    return q, written[0], written[1]


@triton.jit
@no_type_check
def rotate_and_write_heads(
    qkv_ptr,  # [T, N + 2K, H]
    cos_ptr,  # float32 [T, half]
    sin_ptr,
    slot_ptr,  # int32 [T]
    layer_ptr,  # int32 [1]
    q_scale_ptr,  # [L, H]; the norms' pointers are read if C.scaled
    k_scale_ptr,
    norm_layer_ptr,  # int32 [1]
    k_ptr,  # pages
    v_ptr,
    q_ptr,  # [T, N, H]
    C: tl.constexpr,  # RotaryConfig
):
    token = (tl.program_id(0) // C.blocks).to(tl.int64)
    block = tl.program_id(0) % C.blocks
    of_token = qkv_ptr + token * (C.num_heads * C.head_dim)
    cos = cos_ptr + token * C.half
    sin = sin_ptr + token * C.half
    q_scale = q_scale_ptr
    k_scale = k_scale_ptr
    if C.scaled:
        norm_layer = tl.load(norm_layer_ptr).to(tl.int64)
        q_scale += norm_layer * C.head_dim
        k_scale += norm_layer * C.head_dim
    if block < C.q_blocks:
        head = block * C.at_once + tl.arange(0, C.at_once)
        is_head = head < C.num_q_heads
        target = q_ptr + token * (C.num_q_heads * C.head_dim) + head * C.head_dim
        _move(of_token + head * C.head_dim, target, is_head, is_head, cos, sin, q_scale, True, C)
    else:
        slot = tl.load(slot_ptr + token)
        page = slot // C.page_size
        offset = slot % C.page_size
        row = tl.load(layer_ptr).to(tl.int64) * C.row.layer + page.to(tl.int64) * C.row.page + offset * C.row.token
        head = (block - C.q_blocks) % C.kv_blocks * C.at_once + tl.arange(0, C.at_once)
        is_head = head < C.num_kv_heads
        is_written = (head < C.num_kv_heads) & (slot >= 0) & (slot < C.num_slots)
        source = of_token + (C.num_q_heads + head) * C.head_dim
        if block < C.q_blocks + C.kv_blocks:
            _move(source, k_ptr + row + head * C.row.head, is_head, is_written, cos, sin, k_scale, True, C)
        else:
            source += C.num_kv_heads * C.head_dim
            _move(source, v_ptr + row + head * C.row.head, is_head, is_written, cos, sin, k_scale, False, C)


@triton.jit
@no_type_check
def _move(source, target, is_head, is_written, cos_ptr, sin_ptr, scale_ptr, TURNED: tl.constexpr, C: tl.constexpr):
    """Writes the heads that begin at `source`, normed and their pairs turned if `TURNED`, to where `target` says."""
    # Of angles too each thread loads its own: one row of them would go through shared memory, and wait there.
    pair = tl.broadcast_to(tl.arange(0, C.half_block)[None], [C.at_once, C.half_block])
    last = 2 * C.half + tl.arange(0, C.rest_block)[None]
    is_pair = pair < C.half
    is_last = last < C.head_dim
    source = source[:, None]
    target = target[:, None]
    NORMED: tl.constexpr = C.normed and TURNED
    ROWS: tl.constexpr = C.at_once
    squares = tl.zeros([ROWS, 1], tl.float32)
    # All loads come before the first store, which the compiler moves no load across.
    if C.rest > 0:
        outer = is_head[:, None] & is_last
        rest = tl.load(source + last, mask=outer, other=0.0)
        if NORMED:
            squares += _squares(rest)
    if C.half > 0:
        inner = is_head[:, None] & is_pair
        first = tl.load(source + pair, mask=inner, other=0.0)
        second = tl.load(source + C.half + pair, mask=inner, other=0.0)
        if NORMED:
            squares += _squares(first) + _squares(second)
    if NORMED:
        inverse = tl.rsqrt(squares / C.head_dim + C.eps)
        if C.rest > 0:
            rest = _normed(rest, inverse, scale_ptr, tl.broadcast_to(last, [C.at_once, C.rest_block]), outer, C)
        if C.half > 0:
            first = _normed(first, inverse, scale_ptr, pair, inner, C)
            second = _normed(second, inverse, scale_ptr, C.half + pair, inner, C)
    if C.half > 0:
        if TURNED:
            cos = tl.load(cos_ptr + pair, mask=inner)
            sin = tl.load(sin_ptr + pair, mask=inner)
            wide_first = first.to(tl.float32)
            wide_second = second.to(tl.float32)
            first = (wide_first * cos - wide_second * sin).to(first.dtype)
            second = (wide_second * cos + wide_first * sin).to(second.dtype)
        inner = is_written[:, None] & is_pair
        tl.store(target + pair, _stored(first, target, C), mask=inner)
        tl.store(target + C.half + pair, _stored(second, target, C), mask=inner)
    if C.rest > 0:
        tl.store(target + last, _stored(rest, target, C), mask=is_written[:, None] & is_last)


@triton.jit
@no_type_check
def _squares(numbers):
    """The sum over each head."""
    wide = numbers.to(tl.float32)
    return tl.sum(wide * wide, axis=1, keep_dims=True)


@triton.jit
@no_type_check
def _normed(numbers, inverse, scale_ptr, at, mask, C: tl.constexpr):
    """Numbers of heads, rounded as a norm by itself rounds them."""
    wide = numbers.to(tl.float32) * inverse
    if C.scaled:
        wide *= tl.load(scale_ptr + at, mask=mask, other=0.0).to(tl.float32) + C.offset
    return wide.to(numbers.dtype)


@triton.jit
@no_type_check
def _stored(numbers, target, C: tl.constexpr):
    """Numbers as the target has them."""
    if target.dtype.element_ty == tl.uint8:
        FP8: tl.constexpr = C.fp8
        stored = to_fp8(numbers, FP8)
    else:
        stored = numbers.to(target.dtype.element_ty)
    return stored
