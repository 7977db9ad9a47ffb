"""Numbers of the kernel: logits as integers in their order, and a token's probability as an integer."""

from typing import no_type_check

import triton
import triton.language as tl

LEAST_KEY = tl.constexpr(-(2**31))  # below those of all logits
GREATEST_LOGIT = tl.constexpr(3.4028234663852886e38)
LEAST_TEMPERATURE = tl.constexpr(1.1754943508222875e-38)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check
def key_of(logit):
    """An int32 in the order of the logits; -0 is 0."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
@no_type_check
def logit_of(key):
    """The logit of a key; NaN past infinity's."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def amount_of(logit, greatest, factor, C: tl.constexpr):
    """A token's probability over the likeliest one's, as a whole number; that one's is `unit`.

    Args:
        greatest: The row's greatest logit, finite.
        factor: log2(e) over temperature.
    """
    power = tl.minimum((logit - greatest) * factor, 0.0)  # infinity is as the greatest
    return tl.fma(tl.exp2(power), C.unit, 0.5).to(tl.uint32)


@triton.jit
@no_type_check
def rounded(total, C: tl.constexpr):
    """A sum as float32, as XLA's implementation rounds it."""
    LOW: tl.constexpr = 2**C.half_bits
    high = (total >> C.half_bits).to(tl.float32)
    low = (total & (LOW - 1)).to(tl.float32)
    return high * LOW + low
