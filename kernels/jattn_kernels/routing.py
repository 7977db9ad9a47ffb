"""Routing of tokens to experts: the choice of a few of many, and the weights of what they return."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jattn_kernels.lowering.routing import routed
from jattn_kernels.routing_spec import Routing
from jattn_kernels.shapes.routing import check_routing


def route(
    logits: Float[Array, "T E"], routing: Routing, *, bias: Float[Array, " E"] | None = None
) -> tuple[Float32[Array, "T k"], Int32[Array, "T k"]]:
    """The weights and the numbers of each token's experts, the best first; of equals the lower number.

    Shared ones stand before those. All is computed in float32. No expert is chosen from a group that the token may not
    choose from, also where what is left are scores of -inf.

    Args:
        bias: Added to the scores for the choice alone, of groups as of experts; never in the weights.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    check_routing(logits, routing, bias)
    return routed(jnp.asarray(logits).astype(jnp.float32), routing, None if bias is None else jnp.asarray(bias))
