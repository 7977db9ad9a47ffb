"""mxfp4 (OCP Microscaling Formats 1.0): numbers of e2m1, two a byte, and a power of two for each 32 of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

GROUP = 32  # inputs that share a scale
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # of the codes
_MANTISSA = 23  # bits, of float32


def codes_of(values: UInt8[Array, "*L F bytes"]) -> UInt8[Array, "*L F D"]:
    """The four bits of each number."""
    return jnp.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], -1)


def dequantize_mxfp4(
    values: UInt8[Array, "*L F bytes"], scales: UInt8[Array, "*L G F"], dtype: Any
) -> Float[Array, "*L F D"]:
    """What weights stand for; exactly, where the dtype has such exponents. 2**-127 is taken for 0."""
    powers = jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << _MANTISSA, jnp.float32)
    numbers = jnp.asarray(VALUES)[codes_of(values)]
    groups = numbers.reshape(*numbers.shape[:-1], -1, GROUP) * jnp.swapaxes(powers, -1, -2)[..., None]
    return groups.reshape(numbers.shape).astype(dtype)
