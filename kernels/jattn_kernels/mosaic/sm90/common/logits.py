"""From products of queries and keys to logits, on the device: what is done to the numbers of a tile."""

import math

import jax
import jax.numpy as jnp

from jattn_kernels.spec import AttentionSpec

LOG2E = math.log2(math.e)
_SMALL_CAP = 50.0  # an error of 1e-5
_NEAR = 0.625
# (tanh(x) / x - 1) / x^2 as a polynomial in x^2, for |x| < _NEAR, the highest power first.
_TANH_SERIES = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


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
    """cap * tanh(logits / cap): 2^x is exact enough on the device, its tanh is not.

    Both terms are of the cap's size and round to about 2e-7 of it: little beside softmax's own error while the cap is
    small. Under a larger one logits far below it are taken from a polynomial (Cephes' tanhf, Moshier), which rounds as
    they do themselves.
    """
    far = cap - (2 * cap) / (jnp.exp2(logits * (2 * LOG2E / cap)) + 1)
    if cap <= _SMALL_CAP:
        return far
    square = (logits * (1 / cap)) ** 2
    series = jnp.full_like(square, _TANH_SERIES[0])
    for coefficient in _TANH_SERIES[1:]:
        series = series * square + coefficient
    return jnp.where(square < _NEAR**2, logits + logits * (square * series), far)
