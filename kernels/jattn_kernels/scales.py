"""What stored values are divided by, and logits and outputs multiplied with, where values are kept in fp8."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def head_scales(
    scale: Float[Array, ""] | Float[Array, " K"] | Float[Array, "L K"] | None,
    num_kv_heads: int,
    layer_index: Int[Array, ""] | int | None = None,
) -> Float[Array, " K"]:
    """One float32 factor for each head, of a scale for all heads, for each, or for each of each layer; None is 1."""
    if scale is None:
        return jnp.ones(num_kv_heads, jnp.float32)
    if scale.ndim == 2:
        scale = scale[layer_index]
    return jnp.broadcast_to(scale.astype(jnp.float32), (num_kv_heads,))
