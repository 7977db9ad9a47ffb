"""The search for the likeliest tokens that amount to enough, counted or by their probabilities."""

from typing import no_type_check

import triton
import triton.language as tl

from jattn_kernels.triton.filters.numbers import GREATEST_LOGIT, LEAST_KEY, amount_of, key_of, logit_of, rounded
from jattn_kernels.triton.filters.passes import between, sums

_PASSES_BY_LOGIT = tl.constexpr(3)


@triton.jit
@no_type_check
def likeliest(row, low, high, asked, surplus, is_small, greatest, factor, WEIGHED: tl.constexpr, C: tl.constexpr):
    """The fewest tokens, greatest keys first, that amount to enough: the key of the last one.

    A pass over the row tries some keys of the range that the last token's lies in. Once the range has few tokens, they
    are held in registers, and the search ends there.

    Args:
        low, high: The range, int64; `low` may be the key, `high` is past the greatest.
        asked: What is enough; if WEIGHED, the share that is of what all tokens from `low` on amount to.
        surplus: What tokens of the key `low` amount to that do not count, int64.
        is_small: Whether the range is likely to have few tokens as it is.
        WEIGHED: Whether a token amounts to `amount_of`, or to 1.

    Returns:
        The key, what is enough, what all tokens from the key on amount to, and those past it, int64. The third is 0
        where all tokens amount to less than is enough.
    """
    first = low
    enough = asked
    up_to = tl.full([], 0, tl.int64)
    before = tl.full([], 0, tl.int64)
    passes = 0
    is_open = True
    while is_open:
        if passes > 0 or not is_small:
            keys = _tried(low, high, passes, C)
            amounts = sums(row, logit_of(keys), greatest, factor, WEIGHED, C) - tl.where(keys == first, surplus, 0)
            if WEIGHED:
                enough = tl.where(up_to == 0, _share(asked, tl.max(amounts, axis=0), C), enough)
            holds = rounded(amounts, C) >= enough
            before = tl.max(tl.where(holds, before, amounts), axis=0)
            low = tl.max(tl.where(holds, keys, low), axis=0)
            high = tl.min(tl.where(holds, high, keys), axis=0)
            up_to = tl.max(tl.where(holds & (keys == low), amounts, 0), axis=0)
            is_open = high - low > 1
        passes += 1
        if is_open:
            held, most = between(row, logit_of(low), logit_of(high - 1), C)
            if most <= C.depth:
                keys = key_of(held)
                keys = tl.where((held > float("-inf")) & (keys < high), keys, LEAST_KEY)
                if WEIGHED:
                    amounts = tl.where(keys > LEAST_KEY, amount_of(held, greatest, factor, C), 0)
                else:
                    amounts = (keys > LEAST_KEY).to(tl.uint32)
                every = before + _total(amounts) - tl.where(low == first, surplus, 0)
                if WEIGHED:
                    enough = tl.where(up_to == 0, _share(asked, every, C), enough)
                low, up_to, before = last_of(keys, amounts, low, high, every, before, enough, C)
                is_open = False
    return low, enough, up_to, before


@triton.jit
@no_type_check
def last_of(keys, amounts, low, high, up_to, before, enough, C: tl.constexpr):
    """What `likeliest` returns, but for `enough`, of tokens in registers, [depth, places, threads].

    Args:
        amounts: 0 where there is no token.
        up_to, before: What tokens from `low` on amount to, and those from `high` on.
    """
    past = before
    up_to = tl.where(rounded(up_to, C) >= enough, up_to, 0)
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        amount = past + _total(tl.where(keys >= middle.to(tl.int32), amounts, 0))
        holds = rounded(amount, C) >= enough
        low = tl.where(holds, middle, low)
        up_to = tl.where(holds, amount, up_to)
        high = tl.where(holds, high, middle)
        before = tl.where(holds, before, amount)
    return low, up_to, before


@triton.jit
@no_type_check
def among_equals(up_to, before, each, enough, C: tl.constexpr):
    """How many of equal tokens make it enough, and how many there are, int64.

    Args:
        up_to, before: What tokens amount to with all of them, and without.
        each: What one of them amounts to.
    """
    there_are = (up_to - before) // each
    fewer = tl.full([], 0, tl.int64)
    number = there_are
    while number - fewer > 1:
        middle = fewer + ((number - fewer) >> 1)
        holds = rounded(before + middle * each, C) >= enough
        fewer = tl.where(holds, fewer, middle)
        number = tl.where(holds, middle, number)
    return number, there_are


@triton.jit
@no_type_check
def _tried(low, high, passes, C: tl.constexpr):
    """Keys of a range, int64 [thresholds], the first one `low`.

    They cut it into parts of equally many logits; later of equally many keys, which brings any row to an end.
    """
    number = tl.arange(0, C.thresholds)
    part = number.to(tl.float32) / C.thresholds
    top = tl.minimum(logit_of(high), GREATEST_LOGIT)  # past infinity there is NaN
    by_logit = key_of(logit_of(low) * (1 - part) + top * part).to(tl.int64)
    by_key = low + (high - low) * number // C.thresholds
    keys = tl.where(passes < _PASSES_BY_LOGIT, by_logit, by_key)
    return tl.where(number == 0, low, tl.maximum(tl.minimum(keys, high - 1), low + 1))


@triton.jit
@no_type_check
def _share(share, total, C: tl.constexpr):
    """How much of a total is enough: something, at least."""
    return tl.maximum(share * rounded(total, C), 1.0)


@triton.jit
@no_type_check
def _total(amounts):
    """The sum of [depth, places, threads], int64."""
    return tl.sum(tl.sum(tl.sum(amounts, axis=0).to(tl.int64), axis=0), axis=0)
