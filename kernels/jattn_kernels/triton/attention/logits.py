"""From products of queries and keys to logits in base 2, and which keys a row sees, in Triton."""

from typing import no_type_check

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
@no_type_check
def logits_of(products, factor, key, position, slope, C: tl.constexpr):
    """Products scaled, capped and biased, in that order, times log2(e), but for `C.late_scale`.

    Args:
        position: Of each row's query, its own number among the keys.
        slope: ALiBi's, of each row.
    """
    if C.has_slopes or C.soft_cap > 0:
        logits = products * factor
        if C.soft_cap > 0:
            logits = C.soft_cap * _tanh(logits / C.soft_cap)
        if C.has_slopes:
            distance = (key[None] - position[:, None]).to(tl.float32)
            if not C.causal:
                distance = -tl.abs(distance)
            logits += slope[:, None] * distance
        logits = logits * LOG2_E
    elif C.has_factor or C.late_scale == 1.0:
        logits = products * (factor * LOG2_E)
    else:
        logits = products
    return logits


@triton.jit
@no_type_check
def _tanh(x):
    """Of a size beyond 40 nothing but the sign is left, and exp2 must not overflow."""
    size = tl.minimum(tl.abs(x), 40.0)
    tanh = 1.0 - 2.0 / (tl.exp2(size * (2 * LOG2_E)) + 1.0)
    return tl.where(x < 0, -tanh, tanh)


@triton.jit
@no_type_check
def seen_keys(key, first, end, mask_ptr, mask_row, C: tl.constexpr):
    """Whether each row sees each key, keys named by their numbers in the table."""
    seen = key[None] < end[:, None]
    if C.has_first:
        seen &= key[None] >= first[:, None]
    if C.has_mask:
        seen &= tl.load(mask_ptr + mask_row[:, None] + key[None], mask=seen, other=0) != 0
    return seen
