"""MixtureOfExperts: a router sends each token to a few of many gated MLPs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from jattn.parallel import Parallel
from jattn_models.layers import GatedMLP, Linear, precision, random_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The facts of a mixture; static and hashable.

    Attributes:
        count: Experts.
        per_token: Experts that each token goes to.
        intermediate_size: Hidden units of one expert.
        normalised: Whether the chosen experts' weights are scaled to a sum of 1.
        sigmoid: Whether an expert's weight is the sigmoid of its score alone, not a softmax over all experts' scores.
        weighs_inputs: Whether the weight is on what an expert is given, not on what it returns.
        shared_size: Hidden units of an expert that every token goes to beside its own; None for no such expert.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalised: bool
    sigmoid: bool = False
    weighs_inputs: bool = False
    shared_size: int | None = None

    def __post_init__(self):
        if self.per_token > self.count:
            raise ValueError(
                f"`num_experts_per_tok` must be at most the number of experts. Got {self.per_token} of {self.count}."
            )


class GroupedLinear(nnx.Module):
    """One projection an expert; its kernel is [experts, inputs, outputs]."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, dtype: Any, rngs: nnx.Rngs):
        self.kernel = random_weights(rngs, (experts, inputs, outputs), dtype)

    def __call__(self, x: Float[Array, "rows D"], group_sizes: Int[Array, " E"]) -> Float[Array, "rows F"]:
        """Rows are sorted by expert, so many of them each."""
        return jax.lax.ragged_dot(x, self.kernel[...], group_sizes, precision=precision(x))


class MixtureOfExperts(nnx.Module):
    """The weighted sum of a token's chosen experts; each device holds its share of every expert's hidden units.

    No token is dropped and no shape depends on the router: a token has as many rows as it has experts.
    """

    def __init__(self, hidden_size: int, experts: Experts, *, dtype: Any, rngs: nnx.Rngs, parallel: Parallel):
        units = parallel.share(experts.intermediate_size, "An expert's `intermediate_size`")
        self.parallel = parallel
        self.experts = experts
        self.router = Linear(hidden_size, experts.count, dtype=dtype, rngs=rngs)
        self.gate_up_proj = GroupedLinear(experts.count, hidden_size, 2 * units, dtype=dtype, rngs=rngs)
        self.down_proj = GroupedLinear(experts.count, units, hidden_size, dtype=dtype, rngs=rngs)
        self.shared = (
            None
            if experts.shared_size is None
            else GatedMLP(hidden_size, experts.shared_size, dtype=dtype, rngs=rngs, parallel=parallel)
        )

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        weights, chosen = self.route(x)
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert)  # a token's rows, and the way back to them
        group_sizes = jnp.bincount(expert, length=self.experts.count).astype(jnp.int32)
        rows = x[order // self.experts.per_token]
        if self.experts.weighs_inputs:
            rows = (rows.astype(jnp.float32) * weights.reshape(-1)[order][:, None]).astype(x.dtype)
            weights = jnp.ones_like(weights)
        gate, up = jnp.split(self.gate_up_proj(rows, group_sizes), 2, axis=-1)
        rows = self.down_proj(jax.nn.silu(gate) * up, group_sizes)
        parts = rows[jnp.argsort(order)].reshape(*chosen.shape, -1)
        mixed = jnp.sum(parts.astype(jnp.float32) * weights[:, :, None], axis=1)
        mixed = self.parallel.all_reduce(mixed.astype(x.dtype))
        return mixed if self.shared is None else mixed + self.shared(x)

    def route(self, x: Float[Array, "T D"]) -> tuple[Float32[Array, "T k"], Int[Array, "T k"]]:
        """The weights and the numbers of each token's experts, the best first."""
        scores = self.router(x).astype(jnp.float32)
        if not self.experts.sigmoid:
            scores = jax.nn.softmax(scores, axis=-1)
        weights, chosen = jax.lax.top_k(scores, self.experts.per_token)
        if self.experts.sigmoid:  # only now: large scores would become equal
            weights = jax.nn.sigmoid(weights)
        if self.experts.normalised:
            weights /= jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen
