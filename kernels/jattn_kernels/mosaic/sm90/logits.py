"""From products of queries and keys to logits, on the device: what is done to the numbers of a tile."""

import math

import jax
import jax.numpy as jnp

from jattn_kernels.spec import AttentionSpec

LOG2E = math.log2(math.e)


def base2_logits(
    products: jax.Array,
    spec: AttentionSpec,
    *,
    factor: jax.Array | None = None,
    slope: jax.Array | None = None,
    distance: jax.Array | None = None,
) -> jax.Array:
    """Logits over ln 2: products scaled, capped and biased, in that order.

    Args:
        factor: Scale of the queries times that of the keys, a scalar; None is 1.
        slope: ALiBi's, of each number.
        distance: A key's position less a query's, of each number.
    """
    scale = spec.scale if factor is None else spec.scale * factor
    if spec.logits_soft_cap is None and slope is None:
        return products * (scale * LOG2E)
    logits = products * scale
    if spec.logits_soft_cap is not None:
        logits = _capped(logits, spec.logits_soft_cap)
    if slope is not None:
        assert distance is not None
        signed = distance if spec.causal else -jnp.abs(distance)
        logits = logits + slope * signed.astype(jnp.float32)
    return logits * LOG2E


def _capped(logits: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(logits / cap): 2^x is exact enough on the device, its tanh is not."""
    return cap - (2 * cap) / (jnp.exp2(logits * (2 * LOG2E / cap)) + 1)
