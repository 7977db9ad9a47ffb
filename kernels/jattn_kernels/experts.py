"""A mixture of experts after its router: each token's rows through their experts' gated MLPs, weighed and summed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from jattn_kernels.call import ExpertsCall, modes_of
from jattn_kernels.dispatch import choose
from jattn_kernels.lowering.expert_groups import silu_gate
from jattn_kernels.operands import ExpertsOperands
from jattn_kernels.shapes.experts import check_experts

Activation = Callable[[jax.Array, jax.Array], jax.Array]


def mixture_of_experts(
    x: Float[Array, "T D"],
    weights: Float32[Array, "T k"],
    chosen: Int32[Array, "T k"],
    gate_up: Float[Array, "*L E D F2"],
    down: Float[Array, "*L E F D"],
    *,
    gate_up_bias: Float[Array, "*L E F2"] | None = None,
    down_bias: Float[Array, "*L E D"] | None = None,
    activation: Activation = silu_gate,
    weighs_inputs: bool = False,
    layer_index: Int[Array, ""] | int | None = None,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """The sum over a token's experts of weight * down(activation(gate(x), up(x))), in x's dtype.

    Products are summed, and biases, activations and weights applied, in float32; an expert's hidden units and what it
    returns are rounded to x's dtype. The experts that no token goes to are not read. On Hopper a token's result is the
    same to the bit whatever other tokens there are.

    Args:
        weights: Of each token's experts, as `route` gives them.
        chosen: Experts of each token. A number outside 0 .. E - 1 is none, and adds nothing.
        gate_up: Each expert's first projection: the gate's F columns, then those of the other half.
        down: Each expert's second projection.
        gate_up_bias, down_bias: Added to the projections.
        activation: Of the gate's and the other half's outputs, elementwise and hashable.
        weighs_inputs: Whether the weight is on what an expert is given, not on what it returns.
        layer_index: With it the experts' arrays have a leading axis of layers, and this one is meant; may be traced.
            The layer is read in place: no copy of its weights is made.
        implementation: Which one to use; None takes the kernels where they serve the call.

    Raises:
        ValueError: A shape or dtype is wrong, or `implementation` is unknown.
        NotImplementedError: The implementation that was asked for does not serve the call.
    """
    optional = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    check_experts(x, weights, chosen, gate_up, down, optional, layer_index)
    given = {name: value for name, value in optional.items() if value is not None}
    stacks = {"gate_up": gate_up, "down": down, **given}
    if layer_index is None:
        stacks = {name: jnp.asarray(value)[None] for name, value in stacks.items()}
    operands = ExpertsOperands(
        x=jnp.asarray(x),
        weights=jnp.asarray(weights),
        chosen=jnp.asarray(chosen),
        layer_index=jnp.asarray(0 if layer_index is None else layer_index, jnp.int32),
        **stacks,
    )
    call = ExpertsCall(
        num_tokens=x.shape[0],
        per_token=chosen.shape[1],
        num_experts=gate_up.shape[-3],
        hidden_size=x.shape[1],
        units=down.shape[-2],
        dtype=x.dtype.name,
        kernel_dtype=gate_up.dtype.name,
        activation=activation,
        weighs_inputs=weighs_inputs,
        features=frozenset(given),
        modes=modes_of(operands),
    )
    out: Any = choose(call, implementation).implementation.run(call, operands)
    return out
