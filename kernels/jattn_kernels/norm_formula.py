"""The norm as XLA does it, whose derivative is every implementation's."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def norm_of_rows(
    x: Float[Array, "T D"], scale: Float[Array, "L D"], layer_index: Int[Array, ""], *, eps: float, offset: float
) -> Float[Array, "T D"]:
    """Rows over their root mean square, times a layer's scale and an offset."""
    scale = lax.dynamic_index_in_dim(scale, layer_index, keepdims=False)
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * jnp.broadcast_to(scale.astype(jnp.float32) + offset, x.shape)).astype(x.dtype)
