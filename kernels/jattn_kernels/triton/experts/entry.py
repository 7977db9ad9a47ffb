"""A mixture of experts by Triton's kernel: rows in order, two grouped products, and the weighted sum."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.call import ExpertsCall
from jattn_kernels.lowering.expert_groups import ExpertGroups, group_by_expert, weighed_rows, weighted_sum
from jattn_kernels.lowering.routing import routed
from jattn_kernels.operands import ExpertsOperands
from jattn_kernels.triton.experts.activation import steps_of
from jattn_kernels.triton.experts.grouped_product import grouped_product
from jattn_kernels.triton.experts.tile_sizes import product_tiles, rows_of_tile


def mixture_of_experts(call: ExpertsCall, operands: ExpertsOperands) -> Float[Array, "T D"]:
    """Rows are read where they are, weights in place."""
    if call.num_tokens == 0:
        return operands.x
    weights, chosen = operands.weights, operands.chosen
    if call.routing is not None:
        weights, chosen = routed(operands.logits, call.routing, operands.choice_bias)
    groups = group_by_expert(chosen, call.num_experts, rows_of_tile(call), rows_of_choices=call.weighs_inputs)
    rows = weighed_rows(operands.x, weights.T) if call.weighs_inputs else operands.x
    hidden = _hidden(call, operands, rows, groups)
    returned = _returned(call, operands, hidden, groups)
    return weighted_sum(returned, groups.slots, None if call.weighs_inputs else weights.T)


def _hidden(
    call: ExpertsCall, operands: ExpertsOperands, rows: Float[Array, "X D"], groups: ExpertGroups
) -> Float[Array, "S F"]:
    """Each slot's hidden units; by XLA where their inputs are split, or the kernel cannot do the activation."""
    sizes = product_tiles(call, depth=call.hidden_size, columns=2 * call.units)
    given = rows, operands.gate_up, operands.gate_up_bias, operands.layer_index.reshape(1), groups, sizes
    steps = steps_of(call.activation)
    if steps is not None and sizes.splits == 1:
        return grouped_product(*given, gathers=True, steps=steps)
    sums = jnp.sum(grouped_product(*given, gathers=True, in_parts=True), axis=0)
    return call.activation(*jnp.split(sums, 2, axis=1)).astype(rows.dtype)


def _returned(
    call: ExpertsCall, operands: ExpertsOperands, hidden: Float[Array, "S F"], groups: ExpertGroups
) -> Float[Array, "S D"]:
    """What each slot's expert returns."""
    sizes = product_tiles(call, depth=call.units, columns=call.hidden_size)
    given = hidden, operands.down, operands.down_bias, operands.layer_index.reshape(1), groups, sizes
    if sizes.splits == 1:
        return grouped_product(*given, gathers=False)
    return jnp.sum(grouped_product(*given, gathers=False, in_parts=True), axis=0).astype(hidden.dtype)
