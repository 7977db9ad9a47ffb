"""What stored values are divided by, and logits and outputs multiplied with, where values are kept in fp8."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionOptions
from jattn_kernels.spec import AttentionSpec


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


def logit_factors(options: AttentionOptions, spec: AttentionSpec) -> Float[Array, "_B K"]:
    """The scale of queries times that of keys, one row for all sequences or one for each."""
    k_scale = head_scales(options.k_scale, spec.num_kv_heads, options.layer_index)[None]
    if options.q_scale is not None and options.q_scale.ndim == 2:
        return options.q_scale.astype(jnp.float32) * k_scale
    return head_scales(options.q_scale, spec.num_kv_heads)[None] * k_scale
