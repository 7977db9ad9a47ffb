"""What min-p, top-k and top-p keep of a row's tokens, in Triton: all that are not behind one of them.

program (row)       a row that asks for nothing is done at once
    pass            the row's greatest logit, and the greatest at each place of a block
    top-k           what is kept is no less than the k-th greatest of those: few tokens, which fit into registers
    min-p           a bound that follows from the greatest logit
    top-p           passes that try some logits each, until what is in question fits into registers

A pass streams the row through the cache: there are 3 to 6, mostly. Tokens are in order, the greater logit first, then
the lower id. Sums are of integers, so that the order in which threads add up is not seen.
"""

from typing import no_type_check

import triton
import triton.language as tl

from jattn_kernels.triton.filters.numbers import GREATEST_LOGIT, LEAST_TEMPERATURE, LOG2_E, amount_of, key_of, logit_of
from jattn_kernels.triton.filters.passes import ends, place_among_equals
from jattn_kernels.triton.filters.search import among_equals, last_of, likeliest

_NOTHING = tl.constexpr(20.5)  # a token so many powers of e less likely than the likeliest amounts to 0


@triton.jit
@no_type_check
def keep_tokens(
    logits_ptr,  # float32 [B, V]
    temperature_ptr,  # float32 [B]
    top_k_ptr,  # int32 [B]
    top_p_ptr,  # float32 [B]
    log_min_p_ptr,  # float32 [B]
    last_logit_ptr,  # float32 [B]: what is above it is kept, and of the tokens that have it
    last_token_ptr,  # int32 [B]: those up to this one
    C: tl.constexpr,  # FiltersConfig
):
    number = tl.program_id(0)
    temperature = tl.load(temperature_ptr + number)
    top_k = tl.load(top_k_ptr + number)
    top_p = tl.load(top_p_ptr + number)
    log_min_p = tl.load(log_min_p_ptr + number)
    last_logit = tl.full([], float("-inf"), tl.float32)
    last_token = tl.full([], C.vocab_size, tl.int32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (log_min_p > float("-inf"))):
        row = logits_ptr + number.to(tl.int64) * C.vocab_size
        best, greatest, least = ends(row, C)
        if greatest > float("-inf"):
            temperature = tl.maximum(temperature, LEAST_TEMPERATURE)
            last_logit, last_token = _last(row, best, greatest, least, temperature, top_k, top_p, log_min_p, C)
    tl.store(last_logit_ptr + number, last_logit)
    tl.store(last_token_ptr + number, last_token)


@triton.jit
@no_type_check
def _last(row, best, greatest, least, temperature, top_k, top_p, log_min_p, C: tl.constexpr):
    """The last token that is kept: its logit, and an id; tokens of that logit and a greater id are dropped."""
    past = key_of(greatest).to(tl.int64) + 1
    greatest = tl.minimum(greatest, GREATEST_LOGIT)
    factor = tl.div_rn(LOG2_E, temperature)
    none = tl.full([], 0, tl.int64)
    one = tl.full([], 1, tl.int64)
    key = key_of(least).to(tl.int64)
    token = tl.full([], C.vocab_size, tl.int32)
    dropped = none  # how many tokens of the key
    is_small = (top_k > 0) & (top_k <= C.block)  # few more than k tokens are at least the k-th best of `best`
    if (top_k > 0) & (top_k < C.vocab_size):
        k = top_k.to(tl.float32)
        low = key
        if is_small:
            ones = tl.full([1, C.places, C.threads], 1, tl.uint32)
            low, up_to, before = last_of(key_of(best)[None], ones, key, past, none, none, k, C)
        found, k, up_to, before = likeliest(row, low, past, k, none, is_small, greatest, factor, False, C)
        if up_to > 0:
            number, there_are = among_equals(up_to, before, one, k, C)
            key = found
            dropped = there_are - number
            if dropped > 0:
                token = place_among_equals(row, logit_of(key), number.to(tl.int32), C)
    if log_min_p > float("-inf"):
        low = _least_likely(greatest, temperature, log_min_p, past)
        if low > key:
            key = low
            token = tl.full([], C.vocab_size, tl.int32)
            dropped = none
    if top_p < 1:
        low = tl.maximum(key, key_of(greatest - _NOTHING * temperature).to(tl.int64))
        surplus = dropped * amount_of(logit_of(key), greatest, factor, C).to(tl.int64)
        found, enough, up_to, before = likeliest(row, low, past, top_p, surplus, is_small, greatest, factor, True, C)
        each = amount_of(logit_of(found), greatest, factor, C).to(tl.int64)
        number, there_are = among_equals(up_to, before, each, enough, C)
        if number < there_are:
            token = place_among_equals(row, logit_of(found), number.to(tl.int32), C)
        elif found > key:
            token = tl.full([], C.vocab_size, tl.int32)
        key = found
    return logit_of(key), token


@triton.jit
@no_type_check
def _least_likely(greatest, temperature, log_min_p, past):
    """The least key of a likely token: its logit over temperature is no further below the greatest than that."""
    low = key_of(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    high = past
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        logit = tl.minimum(logit_of(middle), GREATEST_LOGIT)
        holds = tl.div_rn(logit - greatest, temperature) >= log_min_p
        high = tl.where(holds, middle, high)
        low = tl.where(holds, low, middle)
    return high
