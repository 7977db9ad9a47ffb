"""The formula of routing: scores, the choice of a few of them, weights; all in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jattn_kernels.routing_spec import Routing

LEAST_SUM = 1e-20  # DeepSeek-V3's; sigmoids of logits below -104 are all 0


def routed(
    logits: Float32[Array, "T E"], routing: Routing, bias: Float[Array, " E"] | None
) -> tuple[Float32[Array, "T k"], Int32[Array, "T k"]]:
    """The weights and the numbers of each token's experts, as `route` has them."""
    scores = _scores(logits, routing)
    # Scores grow with the logits, and large logits differ where their scores are equal; sums of scores do not.
    merit = logits if bias is None and not _sums_scores(routing) else scores
    if bias is not None:
        merit = merit + bias.astype(jnp.float32)[None]
    chosen = _chosen(jnp.where(merit == 0, 0.0, merit), routing)  # top_k takes -0.0 for less than 0.0
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if routing.scoring == "softmax_of_chosen":
        weights = jax.nn.softmax(weights, axis=-1)
    if routing.normalised:
        weights /= jnp.sum(weights, axis=-1, keepdims=True) + LEAST_SUM
    return _behind_shared(routing, weights * routing.scaling_factor, chosen)


def _behind_shared(
    routing: Routing, weights: Float32[Array, "T k"], chosen: Int32[Array, "T k"]
) -> tuple[Float32[Array, "T choices"], Int32[Array, "T choices"]]:
    """A token's choices, the experts first that all go to."""
    if not routing.shared:
        return weights, chosen
    numbers = jnp.arange(routing.num_experts, routing.all_experts, dtype=chosen.dtype)
    numbers = jnp.broadcast_to(numbers[None], (chosen.shape[0], routing.shared))
    ones = jnp.ones(numbers.shape, weights.dtype)
    return jnp.concatenate([ones, weights], axis=1), jnp.concatenate([numbers, chosen], axis=1)


def _scores(logits: Float32[Array, "T E"], routing: Routing) -> Float32[Array, "T E"]:
    match routing.scoring:
        case "softmax":
            return jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            return jax.nn.sigmoid(logits)
        case "softmax_of_chosen":
            return logits


def _sums_scores(routing: Routing) -> bool:
    return routing.group_score == "two_best" and routing.groups_per_token < routing.num_groups


def _chosen(merit: Float32[Array, "T E"], routing: Routing) -> Int32[Array, "T k"]:
    """The best experts of the best groups."""
    if routing.groups_per_token == routing.num_groups:
        return jax.lax.top_k(merit, routing.per_token)[1]
    size = routing.group_size
    groups = merit.reshape(-1, routing.num_groups, size)
    best, _ = jax.lax.top_k(groups, 2 if routing.group_score == "two_best" else 1)
    _, allowed = jax.lax.top_k(jnp.sum(best, axis=-1), routing.groups_per_token)
    allowed = jnp.sort(allowed, axis=-1)  # so that of equals the lower number is still the first
    candidates = jnp.take_along_axis(groups, allowed[:, :, None], axis=1).reshape(-1, routing.groups_per_token * size)
    _, chosen = jax.lax.top_k(candidates, routing.per_token)
    return jnp.take_along_axis(allowed, chosen // size, axis=-1) * size + chosen % size
