"""Mixtures of experts: each token's rows through its experts' gated MLPs, weighed and summed."""

import math
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from jattn_kernels.call import ExpertsCall, modes_of
from jattn_kernels.dispatch import choose
from jattn_kernels.lowering.expert_groups import silu_gate
from jattn_kernels.mixture_operands import ExpertsOperands
from jattn_kernels.operands import names_options
from jattn_kernels.quantized import QuantizedKernel
from jattn_kernels.routing_spec import Routing
from jattn_kernels.shapes.experts import check_choice, check_experts, check_logits
from jattn_kernels.splits import Splits
from jattn_kernels.xla.implementation import XLA


class ExpertsKwargs(TypedDict, total=False):
    """The optional arguments of both faces; `mixture_of_experts` says what each means."""

    gate_up_bias: Float[Array, "*L E F2"] | None
    down_bias: Float[Array, "*L E D"] | None
    activation: Callable[[jax.Array, jax.Array], jax.Array] | None
    layer_index: Int[Array, ""] | int | None
    implementation: str | None


@names_options(ExpertsKwargs)
def mixture_of_experts(
    x: Float[Array, "T D"],
    weights: Float32[Array, "T k"],
    chosen: Int32[Array, "T k"],
    gate_up: Float[Array, "*L E D F2"] | QuantizedKernel,
    down: Float[Array, "*L E F D"] | QuantizedKernel,
    *,
    weighs_inputs: bool = False,
    **options: Unpack[ExpertsKwargs],
) -> Float[Array, "T D"]:
    """The sum over a token's experts of weight * down(activation(gate(x), up(x))), in x's dtype.

    Products are summed, and biases, activations and weights applied, in float32; an expert's hidden units and what it
    returns are rounded to x's dtype. The experts that no token goes to are not read. On Hopper, with weights of
    16 bits, a token's result is the same to the bit whatever other tokens there are; by `triton`, in calls of as many
    tokens.

    Args:
        weights: Of each token's experts, as `route` gives them.
        chosen: Experts of each token. A number outside 0 .. E - 1 is none, and adds nothing. With `weighs_inputs` a
            token's experts must differ.
        gate_up: Each expert's first projection: the gate's F columns, then those of the other half.
        down: Each expert's second projection. Both may be a QuantizedKernel, [*L, E, F2, D] and [*L, E, D, F], of fp8
            with a scale for each output or block, or mxfp4. Rows are not rounded to be multiplied with it.
        gate_up_bias, down_bias: Added to the projections.
        activation: Of the gate's and the other half's outputs, elementwise and hashable; silu(gate) * up if None.
        weighs_inputs: Whether the weight is on what an expert is given, not on what it returns.
        layer_index: With it the experts' arrays have a leading axis of layers, and this one is meant; may be traced.
            The layer is read in place: no copy of its weights is made.
        implementation: Which one to use; None takes the kernels where they serve the call.

    Raises:
        ValueError: A shape or dtype is wrong, or `implementation` is unknown.
        NotImplementedError: The implementation that was asked for does not serve the call.
    """
    check_choice(x, weights, chosen)
    choice = {"weights": jnp.asarray(weights), "chosen": jnp.asarray(chosen)}
    facts: dict[str, Any] = {"per_token": chosen.shape[1], "weighs_inputs": weighs_inputs}
    call, operands = packed_experts(x, gate_up, down, choice, options, **facts)
    return choose(call, options.get("implementation")).implementation.run(call, operands)


@names_options(ExpertsKwargs)
def routed_experts(
    x: Float[Array, "T D"],
    logits: Float[Array, "T E"] | Splits,
    routing: Routing,
    gate_up: Float[Array, "*L A D F2"] | QuantizedKernel,
    down: Float[Array, "*L A F D"] | QuantizedKernel,
    *,
    choice_bias: Float[Array, " E"] | None = None,
    weighs_inputs: bool = False,
    in_splits: bool = False,
    **options: Unpack[ExpertsKwargs],
) -> Float[Array, "T D"] | Splits:
    """`mixture_of_experts` of what `route` chooses; on Hopper one kernel chooses and puts the rows in order.

    Args:
        logits: The router's.
        gate_up, down: Of all experts, A of them, shared ones behind the router's (`Routing.shared`).
        choice_bias: As `bias` of `route`.
        in_splits: Whether the result, [T, D], may be Splits that add up to it.

    Raises:
        ValueError, NotImplementedError: As both.
    """
    check_logits(x, logits, routing, choice_bias)
    choice: dict[str, Any] = {
        "logits": logits if isinstance(logits, Splits) else jnp.asarray(logits).astype(jnp.float32),
        "choice_bias": None if choice_bias is None else jnp.asarray(choice_bias).astype(jnp.float32),
    }
    facts: dict[str, Any] = {"per_token": routing.choices, "weighs_inputs": weighs_inputs, "in_splits": in_splits}
    facts["routing"] = routing
    call, operands = packed_experts(x, gate_up, down, choice, options, **facts)
    return choose(call, options.get("implementation")).implementation.run(call, operands)


def packed_experts(
    x: Any, gate_up: Any, down: Any, choice: dict[str, Any], options: ExpertsKwargs, **facts: Any
) -> tuple[ExpertsCall, ExpertsOperands]:
    """The call of a mixture and its operands, once they are checked.

    Args:
        choice: Operands that say which experts are chosen.
        facts: Of the call.
    """
    biases = {name: options.get(name) for name in ("gate_up_bias", "down_bias")}
    layer_index = options.get("layer_index")
    check_experts(x, gate_up, down, biases, layer_index, facts.get("routing"))
    given = {name: value for name, value in biases.items() if value is not None}
    stacks, facts["scales"] = {**given, **_arrays("gate_up", gate_up), **_arrays("down", down)}, None
    if isinstance(gate_up, QuantizedKernel):
        facts["scales"], facts["block"] = gate_up.scales_kind, _block(gate_up, down)
    if layer_index is None:
        stacks = {name: jnp.asarray(value)[None] for name, value in stacks.items()}
    arrays: dict[str, Any] = {**choice, **stacks}
    operands = ExpertsOperands(
        x=jnp.asarray(x), layer_index=jnp.asarray(0 if layer_index is None else layer_index, jnp.int32), **arrays
    )
    call = ExpertsCall(
        num_tokens=x.shape[0],
        num_experts=gate_up.shape[-3],
        hidden_size=x.shape[1],
        units=down.shape[-2],
        dtype=x.dtype.name,
        kernel_dtype=gate_up.dtype.name,
        activation=options.get("activation") or silu_gate,
        features=frozenset(given),
        modes=modes_of(operands),
        **facts,
    )
    return call, operands


def _block(gate_up: QuantizedKernel, down: Any) -> tuple[int, int] | None:
    """What divides both projections' blocks, if scales are those of blocks."""
    if gate_up.scales_kind != "block":
        return None
    (rows, columns), others = (
        [many // few for many, few in zip(kernel.values.shape[-2:], kernel.scales.shape[-2:], strict=True)]
        for kernel in (gate_up, down)
    )
    return math.gcd(rows, others[0]), math.gcd(columns, others[1])


def _arrays(name: str, kernel: Any) -> dict[str, Any]:
    """A projection's operands by their names."""
    if not isinstance(kernel, QuantizedKernel):
        return {name: kernel}
    scales = jnp.asarray(kernel.scales)
    if kernel.scales_kind == "channel":
        scales = jnp.broadcast_to(scales, (*kernel.values.shape[:-1], 1))
    return {name: jnp.asarray(kernel.values), f"{name}_scales": scales}


def are_multiplied_by_a_kernel(gate_up: QuantizedKernel, down: QuantizedKernel, dtype: Any) -> bool:
    """Whether the default device has a kernel for experts of such weights; elsewhere `xla` makes each expert's wide.

    Args:
        gate_up, down: Arrays, or shapes and dtypes alone.
        dtype: Of the tokens.
    """
    *_, num_experts, hidden_size, columns = gate_up.shape
    call = ExpertsCall(
        num_tokens=1,
        per_token=1,
        num_experts=num_experts,
        hidden_size=hidden_size,
        units=columns // 2,
        dtype=jnp.dtype(dtype).name,
        kernel_dtype=gate_up.dtype.name,
        activation=silu_gate,
        scales=gate_up.scales_kind,
        block=_block(gate_up, down),
    )
    return choose(call).implementation is not XLA
