"""Passes over a row of logits: its ends, sums above some thresholds, the tokens between two, one among equals."""

from typing import no_type_check

import triton
import triton.language as tl

from jattn_kernels.triton.filters.numbers import amount_of


@triton.jit
@no_type_check
def block_of(row, number, C: tl.constexpr):
    """A block of a row's logits, [places, threads]; -inf for NaN and past the end."""
    # Threads stand last, where Triton puts them by itself: what a thread holds it then adds up alone.
    place = tl.arange(0, C.places)[:, None]
    thread = tl.arange(0, C.threads)[None]
    line = place // C.vector * C.threads + thread
    token = number * C.block + line * C.vector + place % C.vector
    logits = tl.load(row + token, mask=token < C.vocab_size, other=float("-inf"))
    return tl.maximum(logits, float("-inf"))  # of NaN and a number it is the number


@triton.jit
@no_type_check
def ends(row, C: tl.constexpr):
    """The greatest logit at each place of a block, the greatest of the row, and its least above -inf."""
    UNROLL: tl.constexpr = C.unroll
    best = tl.full([C.places, C.threads], float("-inf"), tl.float32)
    worst = tl.full([C.places, C.threads], float("inf"), tl.float32)
    for turn in range(C.turns):
        for i in tl.static_range(UNROLL):
            logits = block_of(row, turn * C.unroll + i, C)
            best = tl.maximum(best, logits)
            worst = tl.minimum(worst, tl.where(logits > float("-inf"), logits, float("inf")))
    return best, tl.max(tl.max(best, axis=0), axis=0), tl.min(tl.min(worst, axis=0), axis=0)


@triton.jit
@no_type_check
def sums(row, least, greatest, factor, WEIGHED: tl.constexpr, C: tl.constexpr):
    """What the tokens of each of some logits or more amount to, int64 [thresholds].

    Args:
        least: The logits, [thresholds].
        WEIGHED: By `amount_of`; else each token counts 1.
    """
    UNROLL: tl.constexpr = C.unroll
    totals = tl.full([C.thresholds, C.threads], 0, tl.int64)
    for turn in range(C.turns):
        part = tl.full([C.thresholds, C.threads], 0, tl.uint32)
        for i in tl.static_range(UNROLL):
            logits = block_of(row, turn * C.unroll + i, C)
            if WEIGHED:
                amounts = amount_of(logits, greatest, factor, C)
            else:
                amounts = tl.full([C.places, C.threads], 1, tl.uint32)
            counted = tl.where(logits[None] >= least[:, None, None], amounts[None], 0)
            part += tl.sum(counted, axis=1)
        totals += part.to(tl.int64)
    return tl.sum(totals, axis=1)


@triton.jit
@no_type_check
def between(row, low, high, C: tl.constexpr):
    """The logits in low .. high, [depth, places, threads], and how many some place would have to hold.

    Where that is more than `depth`, the pass ended early and logits are missing. What holds none has -inf.
    """
    UNROLL: tl.constexpr = C.unroll
    held = tl.full([C.depth, C.places, C.threads], float("-inf"), tl.float32)
    count = tl.full([C.places, C.threads], 0, tl.int32)
    layer = tl.arange(0, C.depth)[:, None, None]
    turn = 0
    most = 0
    while (turn < C.turns) & (most <= C.depth):
        for i in tl.static_range(UNROLL):
            logits = block_of(row, turn * C.unroll + i, C)
            inside = (logits >= low) & (logits <= high)
            held = tl.where(inside[None] & (layer == count[None]), logits[None], held)
            count += inside.to(tl.int32)
        turn += 1
        most = tl.max(tl.max(count, axis=0), axis=0)
    return held, most


@triton.jit
@no_type_check
def place_among_equals(row, logit, number, C: tl.constexpr):
    """The id of a token that has a logit: of the first one of these if `number` is 1, and so on."""
    before = 0
    found = 0
    first = -C.block
    while before + found < number:
        before += found
        first += C.block
        found = tl.sum(_is_equal(row, first, logit, C), axis=0)
    is_equal = _is_equal(row, first, logit, C)
    is_it = (is_equal > 0) & (before + tl.cumsum(is_equal, axis=0) == number)
    return tl.min(tl.where(is_it, first + tl.arange(0, C.block), C.vocab_size), axis=0)


@triton.jit
@no_type_check
def _is_equal(row, first, logit, C: tl.constexpr):
    """1 for tokens that have a logit, of the block from `first` on."""
    token = first + tl.arange(0, C.block)
    return (tl.load(row + token, mask=token < C.vocab_size, other=float("nan")) == logit).to(tl.int32)
