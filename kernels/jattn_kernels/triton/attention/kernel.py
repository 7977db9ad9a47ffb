"""Attention of a tile of query rows over a range of keys, in Triton: online softmax (FlashAttention-2).

program (work tile, block of rows, KV head)
    for each tile of keys:      rows found through the page table, an address for each key, so a page may have any size
        logits -> running maximum m, sum l, accumulator acc, in base 2
    the end                     into the output, or into a split's partial result

Decode, extend, paged, ragged and latent calls are one kernel: a work list says which tokens a tile has and which keys
it reads, and each token's bounds say which of those it sees. A row of keys is read in two parts, as Triton's blocks are
powers of two: the halves that a rotary embedding pairs, a latent and its rotated rest, 64 and 16 numbers of 80. Values
in 8 bits are read as pairs, whose parts are the even and the odd columns.
"""

from typing import no_type_check

import triton
import triton.language as tl

from jattn_kernels.triton.attention.keys import key_rows, load_pairs, load_part, rotate_halves
from jattn_kernels.triton.attention.logits import LN_2, LOG2_E, logits_of, seen_keys


@triton.jit
@no_type_check
def attend(
    q0_ptr,  # [T, N, .]: queries, the first part's columns
    q1_ptr,  # of the second part
    k_ptr,
    v_ptr,
    table_ptr,  # int32 [B, columns]; of ragged keys where each sequence's begin, int32 [B + 1]
    layer_ptr,  # int32 [1]
    work_ptr,  # int32 [W, 7]: see `work.py`
    split_ptr,  # int32 [W]: which partial result; -1 where a work tile has all keys of its sequence
    first_ptr,  # int32 [T]: the first key that a token sees
    end_ptr,  # int32 [T]: the one past the last
    position_ptr,  # int32 [T]: the token's own number among the keys
    mask_ptr,  # bool [M]
    mask_row_ptr,  # int32 [T]: where a token's row of the mask begins
    factor_ptr,  # float32 [B or 1, K]: of the products
    v_factor_ptr,  # float32 [K]
    slope_ptr,  # float32 [N]
    sink_ptr,  # float32 [N]
    turn_ptr,  # int32 [half]: a position's angle of each pair, in 2^-32 turns
    out_ptr,  # [T, N, V]
    lse_ptr,  # float32 [T, N]
    split_out_ptr,  # float32 [S, K, rows, V]
    split_lse_ptr,  # float32 [S, K, rows]
    C: tl.constexpr,  # AttendConfig
):
    ROWS: tl.constexpr = C.block_m
    V0: tl.constexpr = C.values.blocks[0]
    V1: tl.constexpr = C.values.blocks[1]
    # The last work tile first: of a causal sequence it has the most keys. Heads of one tile are neighbours.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = program % C.num_kv_heads
    row_block = program // C.num_kv_heads % C.row_blocks
    tile = program // (C.num_kv_heads * C.row_blocks)
    work = work_ptr + tile * 7
    sequence = tl.load(work)
    first_token = tl.load(work + 1)
    num_rows = tl.load(work + 2) * C.group
    if row_block * C.block_m >= num_rows:
        return
    row = row_block * C.block_m + tl.arange(0, C.block_m)
    is_row = row < num_rows
    token = first_token + row // C.group
    head = kv_head * C.group + row % C.group

    at = token.to(tl.int64) * C.num_q_heads + head
    column0 = tl.arange(0, C.keys.blocks[0])
    inner0 = column0 < C.keys.first
    q0 = tl.load(q0_ptr + at[:, None] * C.q0_row + column0[None], mask=is_row[:, None] & inner0[None], other=0.0)
    q0 = q0.to(C.dtype)
    q1 = q0
    if C.keys.second > 0:
        column1 = tl.arange(0, C.keys.blocks[1])
        inner1 = column1 < C.keys.second
        q1 = tl.load(
            q1_ptr + at[:, None] * C.q1_row + C.q1_first + column1[None],
            mask=is_row[:, None] & inner1[None],
            other=0.0,
        )
        q1 = q1.to(C.dtype)

    first = tl.load(first_ptr + token, mask=is_row, other=0)
    end = tl.load(end_ptr + token, mask=is_row, other=0)
    position = first
    if C.has_slopes:
        position = tl.load(position_ptr + token, mask=is_row, other=0)
    mask_row = first
    if C.has_mask:
        mask_row = tl.load(mask_row_ptr + token, mask=is_row, other=0)
    slope = tl.zeros([ROWS], tl.float32)
    if C.has_slopes:
        slope = tl.load(slope_ptr + head, mask=is_row, other=0.0)
    factor = C.scale
    if C.has_factor:
        factor = C.scale * tl.load(factor_ptr + sequence * C.factor_row + kv_head)

    layer = tl.load(layer_ptr).to(tl.int64)
    k_head = k_ptr + C.k.first + layer * C.k.layer + kv_head * C.k.head
    v_head = v_ptr + C.v.first + layer * C.v.layer + kv_head * C.v.head
    table = table_ptr + sequence * C.table_columns

    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, V0], tl.float32)
    acc1 = tl.zeros([ROWS, V1], tl.float32)

    begin = tl.load(work + 3)
    whole_begin = tl.load(work + 4)
    whole_end = tl.load(work + 5)
    last = tl.load(work + 6)
    if C.whole_tiles:
        for start in tl.range(whole_begin, whole_end, C.block_n, num_stages=C.stages):
            m_i, l_i, acc0, acc1 = _attend_keys(
                start, last, q0, q1, m_i, l_i, acc0, acc1, k_head, v_head, table, first, end, position, mask_ptr,
                mask_row, slope, factor, turn_ptr, C, False,
            )  # fmt: skip
    # What some row does not see lies on both sides of that.
    before = (whole_begin - begin) // C.block_n
    after = tl.cdiv(last - whole_end, C.block_n)
    for i in tl.range(0, before + after, num_stages=C.edge_stages):
        start = tl.where(i < before, begin + i * C.block_n, whole_end + (i - before) * C.block_n)
        m_i, l_i, acc0, acc1 = _attend_keys(
            start, last, q0, q1, m_i, l_i, acc0, acc1, k_head, v_head, table, first, end, position, mask_ptr, mask_row,
            slope, factor, turn_ptr, C, True,
        )  # fmt: skip

    is_empty = m_i == float("-inf")
    safe_l = tl.where(is_empty, 1.0, l_i)
    share = tl.where(is_empty, 0.0, 1.0 / safe_l)
    lse = tl.where(is_empty, float("-inf"), (m_i + tl.log2(safe_l)) * LN_2)
    if C.has_v_factor:
        share *= tl.load(v_factor_ptr + kv_head)
    split = tl.load(split_ptr + tile)
    if split < 0:
        if C.has_sinks:
            sink = tl.load(sink_ptr + head, mask=is_row, other=0.0)
            share *= tl.where(is_empty, 0.0, 1.0 / (1.0 + tl.exp2((sink - lse) * LOG2_E)))
        tl.store(lse_ptr + at, lse, mask=is_row)
        _store(out_ptr, at, acc0 * share[:, None], acc1 * share[:, None], is_row, C)
    else:
        part = (split * C.num_kv_heads + kv_head).to(tl.int64) * C.split_rows + row
        tl.store(split_lse_ptr + part, lse, mask=is_row)
        _store(split_out_ptr, part, acc0 * share[:, None], acc1 * share[:, None], is_row, C)


@triton.jit
@no_type_check
def _store(out_ptr, at, out0, out1, is_row, C: tl.constexpr):
    """Both parts of rows of values."""
    out = out_ptr + at[:, None] * C.value_dim
    if C.v_pairs:
        column = tl.arange(0, C.value_dim)
        tl.store(out + column[None], tl.interleave(out0, out1).to(out_ptr.dtype.element_ty), mask=is_row[:, None])
        return
    column0 = tl.arange(0, C.values.blocks[0])
    inner0 = is_row[:, None] & (column0 < C.values.first)[None]
    tl.store(out + column0[None], out0.to(out_ptr.dtype.element_ty), mask=inner0)
    if C.values.second > 0:
        column1 = tl.arange(0, C.values.blocks[1])
        inner1 = is_row[:, None] & (column1 < C.values.second)[None]
        tl.store(out + C.values.first + column1[None], out1.to(out_ptr.dtype.element_ty), mask=inner1)


@triton.jit
@no_type_check
def _attend_keys(
    start, last, q0, q1, m_i, l_i, acc0, acc1, k_head, v_head, table, first, end, position, mask_ptr, mask_row, slope,
    factor, turn_ptr, C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running result with a tile of keys taken in."""
    key = start + tl.arange(0, C.block_n)
    is_key = key < last
    k_row = key_rows(start, last, table, False, C)
    k0 = load_part(k_head, k_row, is_key, 0, MASKED, C)
    k1 = k0
    if C.keys.second > 0:
        k1 = load_part(k_head, k_row, is_key, 1, MASKED, C)
    if C.rotates:
        k0, k1 = rotate_halves(k0, k1, key, turn_ptr, C)
    k0 = k0.to(C.dtype)
    if C.shares_keys:
        # Of a product whose result goes into another, Triton gives the warps rows alone: with 64 of them two warpgroups
        # would do the same. It does not look past an `if`, whose branches LLVM then sees to be one.
        if start < last:
            part0 = tl.dot(q0, k0.trans(), input_precision=C.precision)
            part1 = tl.dot(q1, k1.to(C.dtype).trans(), input_precision=C.precision)
        else:
            part0 = tl.dot(q0, k0.trans(), input_precision=C.precision)
            part1 = tl.dot(q1, k1.to(C.dtype).trans(), input_precision=C.precision)
        products = part0 + part1
    else:
        products = tl.dot(q0, k0.trans(), input_precision=C.precision)
        if C.keys.second > 0:
            products = tl.dot(q1, k1.to(C.dtype).trans(), products, input_precision=C.precision)
    if C.asks_early:
        # Triton puts an `if` that nothing else waits for at the end of a pass, after the loads for the next one.
        if start < last:
            m_i, l_i, acc0, acc1 = _take_in(
                products, start, last, k0, k_row, m_i, l_i, acc0, acc1, v_head, table, first, end, position, mask_ptr,
                mask_row, slope, factor, C, MASKED,
            )  # fmt: skip
        return m_i, l_i, acc0, acc1
    return _take_in(
        products, start, last, k0, k_row, m_i, l_i, acc0, acc1, v_head, table, first, end, position, mask_ptr, mask_row,
        slope, factor, C, MASKED,
    )  # fmt: skip


@triton.jit
@no_type_check
def _take_in(
    products, start, last, k0, k_row, m_i, l_i, acc0, acc1, v_head, table, first, end, position, mask_ptr, mask_row,
    slope, factor, C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running result with a tile's products and values taken in."""
    key = start + tl.arange(0, C.block_n)
    is_key = key < last
    logits = logits_of(products, factor, key, position, slope, C)
    if MASKED:
        seen = seen_keys(key, first, end, mask_ptr, mask_row, C)
        logits = tl.where(seen, logits, float("-inf"))

    # One multiplication and subtraction a logit, where their order by size is that of the products.
    SCALE: tl.constexpr = C.late_scale
    new_m = tl.maximum(m_i, tl.max(logits, axis=1) * SCALE)
    shift = new_m
    if MASKED:
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(logits * SCALE - shift[:, None])
    alpha = tl.exp2(m_i - shift)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    p = p.to(C.dtype)
    if C.v_is_k:
        v0 = k0
        v_row = k_row
    else:
        v_row = k_row
        if C.v_rows_apart:
            v_row = key_rows(start, last, table, True, C)
        if C.v_pairs:
            v0, v1 = load_pairs(v_head, v_row, is_key, MASKED, C)
        else:
            v0 = load_part(v_head, v_row, is_key, 2, MASKED, C).to(C.dtype)
    acc0 = tl.dot(p, v0, acc0 * alpha[:, None], input_precision=C.precision)
    if C.values.second > 0:
        if not C.v_pairs:
            v1 = load_part(v_head, v_row, is_key, 3, MASKED, C).to(C.dtype)
        acc1 = tl.dot(p, v1, acc1 * alpha[:, None], input_precision=C.precision)
    return new_m, l_i, acc0, acc1
