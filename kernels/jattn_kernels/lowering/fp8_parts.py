"""Queries as sums of fp8 values, for products with fp8 keys as they are stored; or divided into float16's range."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jattn_kernels.spec import AttentionSpec

MANTISSA_BITS, EXPONENT = 23, 0x7F800000  # of a float32
SIZES = 2.0**-100, 2.0**126  # what may be divided by without a subnormal number
NARROW_SIZE = 2.0**7  # the largest number of a head is in [this, twice this), which all dtypes of 8 bits hold


def in_range(
    q: Float[Array, "B Q N H"], dtype: Any, spec: AttentionSpec
) -> tuple[Float[Array, "B Q N H"], Float[Array, "_B _K"]]:
    """Queries in a dtype, and powers of two that they were divided by: float16 has not the range of bfloat16."""
    if dtype != jnp.float16 or q.dtype != jnp.bfloat16:
        return q.astype(dtype), jnp.ones((1, 1), jnp.float32)
    size = _sizes(q, spec)
    return _divided(q, size).astype(dtype), size


def in_parts(
    q: Float[Array, "B Q N H"], dtype: Any, spec: AttentionSpec
) -> tuple[tuple[Float[Array, "B Q N H"], ...], Float[Array, "_B _K"]]:
    """8-bit values whose sums are the queries, and powers of two that those were divided by.

    Each part takes the leading bits of what the ones before it left. So the sum is exact, but for what lies 2^16 and
    more below the largest number of a head.
    """
    if q.dtype == dtype:
        return (q,), jnp.ones((1, 1), jnp.float32)
    size = _sizes(q, spec) / NARROW_SIZE
    rest, parts = _divided(q, size), []
    for _ in range(num_parts(q.dtype, dtype)):
        part = leading_bits(rest, dtype)
        parts.append(part.astype(dtype))
        rest -= part
    return tuple(parts), size


def leading_bits(x: Float32[Array, "..."], dtype: Any) -> Float32[Array, "..."]:
    """Numbers with as many bits as one of a dtype has; not by a conversion and back, which XLA takes for nothing."""
    dropped = MANTISSA_BITS - jnp.finfo(dtype).nmant
    bits = lax.bitcast_convert_type(x, jnp.int32) + (1 << (dropped - 1))
    return lax.bitcast_convert_type(bits & -(1 << dropped), jnp.float32)


def num_parts(q_dtype: Any, dtype: Any) -> int:
    """How many numbers of a dtype `in_parts` takes for one of a query."""
    return -(-_significant_bits(q_dtype) // _significant_bits(dtype))


def _sizes(q: Float[Array, "B Q N H"], spec: AttentionSpec) -> Float[Array, "B K"]:
    """The power of two below the largest number of each sequence and kv head; 1 if all are zero."""
    wide = q.astype(jnp.float32).reshape(*q.shape[:2], spec.num_kv_heads, -1)
    exponent = lax.bitcast_convert_type(jnp.max(jnp.abs(wide), axis=(1, 3)), jnp.int32) & EXPONENT
    size = lax.bitcast_convert_type(exponent, jnp.float32)
    return jnp.where(exponent == 0, 1.0, jnp.clip(size, *SIZES))


def _divided(q: Float[Array, "B Q N H"], size: Float[Array, "B K"]) -> Float[Array, "B Q N H"]:
    wide = q.astype(jnp.float32).reshape(*q.shape[:2], size.shape[1], -1)
    return (wide / size[:, None, :, None]).reshape(q.shape)


def _significant_bits(dtype: Any) -> int:
    return jnp.finfo(dtype).nmant + 1
