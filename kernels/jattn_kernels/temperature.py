"""Logits over temperature: the logarithms of probabilities, but for a constant."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def over_temperature(logits: Float[Array, "B V"], temperature: Float[Array, " B"]) -> Float[Array, "B V"]:
    """Logits over temperature, the greatest moved to 0 first, so that no temperature overflows.

    Args:
        logits: No NaN.
    """
    info = jnp.finfo(logits.dtype)
    logits = jnp.minimum(logits, info.max)
    # A row of -inf alone stays -inf: its greatest is not subtracted from itself, which would be NaN.
    greatest = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), info.min)
    return (logits - greatest) / jnp.maximum(temperature, info.tiny)[:, None]
