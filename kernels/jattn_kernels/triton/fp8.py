"""8-bit floats in Triton: by instructions where a GPU has them (Ada and later), by integer arithmetic where not."""

from typing import no_type_check

import triton
import triton.language as tl

NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}  # of dtypes, as the functions here have them


@triton.jit
@no_type_check
def to_fp8(x, FP8: tl.constexpr):
    """The bytes of numbers clipped to the finite range of e4m3 or e5m2, and rounded to nearest, ties to even.

    A NaN stays one.
    """
    if FP8 == "e4m3":
        MANTISSA: tl.constexpr = 3
        BIAS: tl.constexpr = 7
        MOST: tl.constexpr = 448.0
        NAN: tl.constexpr = 0x7F
    else:
        MANTISSA: tl.constexpr = 2
        BIAS: tl.constexpr = 15
        MOST: tl.constexpr = 57344.0
        NAN: tl.constexpr = 0x7E
    DROPPED: tl.constexpr = 23 - MANTISSA
    x = x.to(tl.float32)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), MOST)
    bits = size.to(tl.uint32, bitcast=True)
    even = (bits >> DROPPED) & 1
    normal = ((bits + (1 << (DROPPED - 1)) - 1 + even) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Below the normal numbers lie multiples of one step: float32 that are so large that it is their last place.
    LARGE: tl.constexpr = 2.0 ** (DROPPED + 1 - BIAS)
    below = (size + LARGE).to(tl.uint32, bitcast=True) & 0xFF
    byte = tl.where(size < 2.0 ** (1 - BIAS), below, normal)
    return (sign | tl.where(x == x, byte, NAN)).to(tl.uint8)


@triton.jit
@no_type_check
def from_fp8(byte, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """float16 of the bytes of 8-bit floats, all of them exact.

    A NaN of e4m3 may become 480; numbers that a pool stores are finite.

    Args:
        NATIVE: Whether the GPU has instructions for e4m3.
    """
    bits = byte.to(tl.uint16)
    if FP8 == "e5m2":
        half = (bits << 8).to(tl.float16, bitcast=True)
    elif NATIVE:
        half = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        half = half * 256.0  # the exponents' biases are 8 apart
    return half
