"""From products of queries and keys to logits, and from values to the output: what is done to the numbers of a tile."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionOptions
from jattn_kernels.spec import AttentionSpec


def compute_dtype(q_dtype) -> jnp.dtype:
    """What matrix products are done in and the output is given in: the queries' dtype, bfloat16 for fp8 queries."""
    return jnp.dtype(jnp.bfloat16 if jnp.finfo(q_dtype).bits == 8 else q_dtype)


def logits_of(
    products: Float[Array, "W K G R S"],
    factor: Float[Array, "_W K"],
    distance: Int[Array, "W R S"],
    options: AttentionOptions,
    spec: AttentionSpec,
) -> Float[Array, "W K G R S"]:
    """Products scaled, capped and biased, in that order; `distance` is a key's position less a query's."""
    logits = products * spec.scale * factor[:, :, None, None, None]
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.astype(jnp.float32).reshape(1, spec.num_kv_heads, spec.group_size, 1, 1)
        signed = distance if spec.causal else -jnp.abs(distance)
        logits = logits + slopes * signed[:, None, None].astype(jnp.float32)
    return logits
