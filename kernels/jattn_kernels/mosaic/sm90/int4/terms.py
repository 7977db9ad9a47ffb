"""Rows in two terms of fp8 (e4m3) beside the sums of their groups, for weights that are off by as much in each.

The terms are as the experts' (`experts/two_terms.py`), but made by XLA: rows of bfloat16 that are divided by a power of
two, so that the largest number is 128 up to 256, are the sum of both, but for what is off by 2^-17 of the largest.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jattn_kernels.mosaic.sm90.experts.e2m1 import in_order
from jattn_kernels.mosaic.sm90.int4.bytes import OFFSET, UNIT
from jattn_kernels.quantized import FP8

TERMS = 2
_MANTISSA, _BIAS, _TOP = 23, 127, 7  # of float32; the exponent that a row's largest number gets
_EXPONENT_BITS, _MANTISSA_BITS = 8, 3  # of float32 and of e4m3
_LEAST = 2.0**-6  # of e4m3's normal numbers
_SUMS_TOGETHER = 32  # float32 of 128 bytes, at which TMA's copies begin


class Terms(NamedTuple):
    """Rows as they are multiplied.

    Attributes:
        x: Both terms of each row, in the order of weights of 4 bits.
        sums: What a group's sum of products starts from; more rows than there are.
        scales: Of each row, that of the weights' unit included.
    """

    x: Float[Array, "2 R D"]
    sums: Float32[Array, "G W"]
    scales: Float32[Array, " R"]


def terms_of(x: Float[Array, "T D"], *, num_rows: int, group: int) -> Terms:
    """x in two terms, with rows of 0 up to `num_rows`."""
    rows = jnp.pad(x.astype(jnp.float32), ((0, num_rows - x.shape[0]), (0, 0)))
    largest = lax.bitcast_convert_type(jnp.max(jnp.abs(rows), axis=1), jnp.int32)
    exponent = jnp.maximum(largest >> _MANTISSA, _TOP + 1)
    numbers = rows * _power(2 * _BIAS + _TOP - exponent)[:, None]
    # Not two conversions: XLA takes those out.
    first = lax.reduce_precision(numbers, _EXPONENT_BITS, _MANTISSA_BITS)
    first = jnp.where(jnp.abs(numbers) < _LEAST, 0.0, first)
    both = jnp.concatenate([first, numbers - first]).astype(FP8)
    sums = numbers.reshape(num_rows, -1, group).sum(axis=-1).T * (-OFFSET * UNIT)
    return Terms(
        x=in_order(both).reshape(TERMS, num_rows, -1),
        sums=jnp.pad(sums, ((0, 0), (0, -num_rows % _SUMS_TOGETHER))),
        scales=_power(exponent - _TOP) / UNIT,
    )


def _power(exponent: Array) -> Array:
    return lax.bitcast_convert_type(exponent << _MANTISSA, jnp.float32)
