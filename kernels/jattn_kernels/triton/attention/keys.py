"""Rows of keys and values in Triton: where a key's row lies, and a part of it in registers."""

import triton
import triton.language as tl

ANGLE = tl.constexpr(6.283185307179586 / 2**32)


@triton.jit
def key_rows(key, is_key, table, S: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Where the rows of some keys begin, in numbers from the layer's and the head's first.

    Args:
        table: The sequence's row of the page table; of ragged keys where its first row stands.
        S: Strides of keys or of values.
        PAGE_SIZE: 0 of ragged keys.
    """
    if PAGE_SIZE == 0:
        return (tl.load(table) + key).to(tl.int64) * S.token
    page = tl.load(table + key // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
    return page * S.page + (key % PAGE_SIZE) * S.token


@triton.jit
def load_part(
    head, row, is_key, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST + WIDTH - 1 of rows, [keys, BLOCK]; zeros past them, and in rows that are no key."""
    column = tl.arange(0, BLOCK)
    at = head + row[:, None] + (FIRST + column)[None]
    if WIDTH == BLOCK:
        if MASKED:
            part = tl.load(at, mask=is_key[:, None], other=0)
        else:
            part = tl.load(at)
    else:
        part = tl.load(at, mask=is_key[:, None] & (column < WIDTH)[None], other=0)
    if FP8 == "":
        return part
    return from_fp8(part, FP8)


@triton.jit
def from_fp8(byte, FP8: tl.constexpr):
    """float16 of the bytes of 8-bit floats, by integer arithmetic: every one is exact, and no GPU lacks it.

    A NaN of e4m3 becomes 480; numbers that a pool stores are finite.
    """
    bits = byte.to(tl.uint16)
    if FP8 == "e5m2":
        return (bits << 8).to(tl.float16, bitcast=True)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half * 256.0  # the exponents' biases are 8 apart


@triton.jit
def rotate_halves(k0, k1, key, turn_ptr, C: tl.constexpr):
    """Both halves of keys rotated by their numbers in the table, in float32: a query's distance is all that matters."""
    pair = tl.arange(0, C.key.blocks[0])
    turn = tl.load(turn_ptr + pair, mask=pair < C.key.first, other=0)
    angle = (key[:, None] * turn[None]).to(tl.float32) * ANGLE  # whole turns wrap, as integers do
    cos = tl.cos(angle) / C.shrink
    sin = tl.sin(angle) / C.shrink
    first = k0.to(tl.float32)
    second = k1.to(tl.float32)
    return (first * cos - second * sin).to(C.dtype), (second * cos + first * sin).to(C.dtype)
