"""Rows in two terms of fp8 (e4m3), whose sum has the eight bits of bfloat16: products in fp8 that round no row.

A row is divided by a power of two that brings its largest number to 128 up to 256. The first term is the nearest number
of four bits, the second what is left, which four bits hold. What is smaller than 1 / 512 of the row's largest number is
off by at most 2^-17 of that; the others are exact.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jattn_kernels.mosaic.sm90.experts.e2m1 import in_order
from jattn_kernels.quantized import FP8

TERMS = 2
_MANTISSA, _BIAS, _TOP = 23, 127, 7  # of float32; the exponent that a row's largest number gets
_HALF, _KEPT = 1 << 19, -(1 << 20)  # of float32's bits: what rounds to four of them, and these with sign and exponent
_LEAST = 2.0**-6  # of e4m3's normal numbers


def two_terms(
    rows: Float[Array, "X D"],
    sources: Int[Array, " S"] | None,
    *,
    block_rows: int,
    block_depth: int,
    turned: bool,
) -> tuple[Float[Array, "2 R K"], Float32[Array, " R"]]:
    """Both terms of each slot's row, and the rows' factors; 0 behind the depth and behind the last slot.

    Args:
        rows: bfloat16.
        sources: Which row stands in a slot; None where row i stands in slot i.
        block_rows, block_depth: What the depth is made a multiple of, and how many rows come behind the last slot.
        turned: Whether inputs are in the order of weights of 4 bits.
    """
    largest = jnp.max(jnp.abs(rows), axis=1).astype(jnp.float32)
    exponent = jnp.maximum(_bits(largest) >> _MANTISSA, _TOP + 1)
    if sources is not None:
        rows, exponent = rows[sources], exponent[sources]
    exponent = jnp.pad(exponent, (0, block_rows), constant_values=_BIAS)
    rows = jnp.pad(rows, ((0, block_rows), (0, -rows.shape[1] % block_depth)))
    if turned:
        rows = in_order(rows)
    numbers = rows.astype(jnp.float32) * _float((2 * _BIAS + _TOP - exponent) << _MANTISSA)[:, None]
    first = _float((_bits(numbers) + _HALF) & _KEPT)
    first = jnp.where(jnp.abs(numbers) < _LEAST, 0.0, first)
    terms = jnp.stack([first, numbers - first]).astype(FP8)
    return terms, _float((exponent - _TOP) << _MANTISSA)


def _bits(numbers: Float32[Array, "*shape"]) -> Int[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(numbers, jnp.int32)


def _float(bits: Int[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)
