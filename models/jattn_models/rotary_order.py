"""Projections of checkpoints whose heads turn in pairs of neighbours, in an order in which halves of a head turn."""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from jattn_models.attention import Attention


def neighbours_to_halves(attentions: Iterable[Attention], rotary_dim: int) -> None:
    """Reorders, in place, what makes queries and keys: each head's products are the same in either order.

    Args:
        attentions: A stack of layers each.
        rotary_dim: Dimensions of a head that turn; those after them stay where they are.
    """
    for attention in attentions:
        order, projection = jnp.asarray(_columns(attention, rotary_dim)), attention.qkv_proj
        for leaf in (projection.kernel, projection.bias):
            if leaf is not None:
                leaf[...] = jnp.take(leaf[...], order, axis=-1)


def _columns(attention: Attention, rotary_dim: int) -> np.ndarray:
    """For each column of the fused projection the one to take: of queries and keys even dimensions, then odd ones."""
    turning, heads = (attention.num_q_heads + times * attention.num_kv_heads for times in (1, 2))
    columns = np.arange(heads * attention.head_dim, dtype=np.int32).reshape(heads, attention.head_dim)
    turned = columns[:turning, :rotary_dim]
    columns[:turning, :rotary_dim] = np.concatenate([turned[:, ::2], turned[:, 1::2]], axis=1)
    return columns.reshape(-1)
