"""Merging attention over parts of the keys: outputs with their log-sum-exps."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.shapes.merge import check_merge, check_merge_of_two


def merge_states(
    outs: Float[Array, "parts *rows N H"], lses: Float[Array, "parts *rows N"]
) -> tuple[Float[Array, "*rows N H"], Float[Array, "*rows N"]]:
    """Output and lse over all keys from those of disjoint parts.

    Args:
        outs: Each part's output; finite where the part is empty.
        lses: Each part's natural-log lse; -inf marks an empty part, whose output counts for nothing.

    Returns:
        The output in the dtype of `outs` and the float32 lse; 0 and -inf where every part is empty.

    Raises:
        ValueError: The shapes do not belong together.
    """
    check_merge(outs, lses)
    lses = lses.astype(jnp.float32)
    top = jnp.max(lses, axis=0)
    empty = top == -jnp.inf
    weights = jnp.exp(lses - jnp.where(empty, 0.0, top)[None])
    total = jnp.where(empty, 1.0, jnp.sum(weights, axis=0))
    parts = jnp.where((lses == -jnp.inf)[..., None], 0.0, outs.astype(jnp.float32))
    out = jnp.sum(parts * weights[..., None], axis=0) / total[..., None]
    return out.astype(outs.dtype), jnp.where(empty, -jnp.inf, top + jnp.log(total))


def merge_state(
    out_a: Float[Array, "*rows N H"],
    lse_a: Float[Array, "*rows N"],
    out_b: Float[Array, "*rows N H"],
    lse_b: Float[Array, "*rows N"],
) -> tuple[Float[Array, "*rows N H"], Float[Array, "*rows N"]]:
    """`merge_states` of two parts.

    Raises:
        ValueError: The shapes do not belong together.
    """
    check_merge_of_two(out_a, lse_a, out_b, lse_b)
    return merge_states(jnp.stack([out_a, out_b]), jnp.stack([lse_a, lse_b]))


def sink_share(lse: Float[Array, "*rows N"], sinks: Float[Array, " N"]) -> Float[Array, "*rows N"]:
    """The part of the denominator that is keys and not the head's sink, which the output is multiplied with.

    Args:
        lse: Natural-log lse over all keys, sinks excluded.
    """
    sinks = jnp.broadcast_to(sinks.astype(jnp.float32), lse.shape)
    return jnp.where(lse == -jnp.inf, 0.0, jax.nn.sigmoid(lse - sinks))


def lse_to_base2(lse: Float[Array, "..."]) -> Float[Array, "..."]:
    """A natural-log lse in base 2, as FlashInfer has it."""
    return lse * math.log2(math.e)


def lse_from_base2(lse: Float[Array, "..."]) -> Float[Array, "..."]:
    """A base-2 lse in natural log."""
    return lse * math.log(2)
