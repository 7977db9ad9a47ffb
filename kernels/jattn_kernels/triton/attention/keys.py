"""Rows of keys and values in Triton: where a key's row lies, and a part of it in registers."""

from typing import no_type_check

import triton
import triton.language as tl

from jattn_kernels.triton.fp8 import from_fp8

ANGLE = tl.constexpr(6.283185307179586 / 2**32)


@triton.jit
@no_type_check
def key_rows(start, last, table, OF_VALUES: tl.constexpr, C: tl.constexpr):
    """Where the rows of a tile's keys or of their values begin, in numbers from the layer's and the head's first.

    Args:
        start: The first key, a multiple of `C.block_n`.
        last: The key past the last one that is read.
        table: The sequence's row of the page table; of ragged keys where its first row stands.
    """
    PAGE: tl.constexpr = C.v.page if OF_VALUES else C.k.page
    TOKEN: tl.constexpr = C.v.token if OF_VALUES else C.k.token
    key = start + tl.arange(0, C.block_n)
    if C.page_size == 0:
        row = (tl.load(table) + key).to(tl.int64) * TOKEN
    elif C.has_whole_pages:
        # A thread loads a page's number once, and not for each of its keys.
        first = start + tl.arange(0, C.block_n // C.page_size) * C.page_size
        page = tl.load(table + first.to(tl.uint32) // C.page_size, mask=first < last, other=0)
        slot = page[:, None] * C.page_size + tl.arange(0, C.page_size)[None]
        row = tl.reshape(slot, [C.block_n]).to(tl.int64) * TOKEN
    else:
        place = key.to(tl.uint32)  # whose division by a power of two is a shift
        page = tl.load(table + place // C.page_size, mask=key < last, other=0)
        within = (place % C.page_size).to(tl.int32)
        if C.page_size * TOKEN == PAGE:
            row = (page * C.page_size + within).to(tl.int64) * TOKEN
        else:
            row = page.to(tl.int64) * PAGE + within * TOKEN
    return row


@triton.jit
@no_type_check
def load_part(head, row, is_key, PART: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr):
    """A part of rows, [keys, columns], as `AttendConfig.columns` numbers them; zeros past it, and in rows of no key."""
    FIRST: tl.constexpr = C.columns[PART][0]
    WIDTH: tl.constexpr = C.columns[PART][1]
    BLOCK: tl.constexpr = C.columns[PART][2]
    column = tl.arange(0, BLOCK)
    at = head + row[:, None] + (FIRST + column)[None]
    if WIDTH == BLOCK:
        if MASKED:
            part = tl.load(at, mask=is_key[:, None], other=0)
        else:
            part = tl.load(at)
    else:
        part = tl.load(at, mask=is_key[:, None] & (column < WIDTH)[None], other=0)
    FP8: tl.constexpr = C.fp8
    if FP8 != "":
        part = from_fp8(part, FP8, C.native_fp8)
    return part


@triton.jit
@no_type_check
def load_pairs(head, row, is_key, MASKED: tl.constexpr, C: tl.constexpr):
    """The even and the odd columns of 8-bit values, [keys, columns] both.

    A product wants its second operand by columns, which shared memory gives in numbers of 16 bits and not of 8.
    """
    pair = tl.arange(0, C.values.blocks[0])
    at = head.to(tl.pointer_type(tl.uint16), bitcast=True) + (row >> 1)[:, None] + pair[None]
    if MASKED:
        pairs = tl.load(at, mask=is_key[:, None], other=0)
    else:
        pairs = tl.load(at)
    FP8: tl.constexpr = C.fp8
    even = from_fp8((pairs & 0xFF).to(tl.uint8), FP8, C.native_fp8)
    odd = from_fp8((pairs >> 8).to(tl.uint8), FP8, C.native_fp8)
    return even.to(C.dtype), odd.to(C.dtype)


@triton.jit
@no_type_check
def rotate_halves(k0, k1, key, turn_ptr, C: tl.constexpr):
    """Both halves of keys rotated by their numbers in the table, in float32: a query's distance is all that matters."""
    pair = tl.arange(0, C.keys.blocks[0])
    turn = tl.load(turn_ptr + pair, mask=pair < C.keys.first, other=0)
    angle = (key[:, None] * turn[None]).to(tl.float32) * ANGLE  # whole turns wrap, as integers do
    cos = tl.cos(angle) / C.shrink
    sin = tl.sin(angle) / C.shrink
    first = k0.to(tl.float32)
    second = k1.to(tl.float32)
    return (first * cos - second * sin).to(C.dtype), (second * cos + first * sin).to(C.dtype)
