"""A mixture of experts by Triton's kernel: rows in order, two grouped products, and the weighted sum."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.call import ExpertsCall
from jattn_kernels.lowering.expert_groups import (
    ExpertGroups,
    ProductOperands,
    group_by_expert,
    sum_in_pieces,
    weighed_rows,
)
from jattn_kernels.lowering.routing import routed
from jattn_kernels.mixture_operands import ExpertsOperands
from jattn_kernels.splits import added
from jattn_kernels.triton.experts.activation import steps_of
from jattn_kernels.triton.experts.grouped_product import grouped_product
from jattn_kernels.triton.experts.tile_sizes import product_tiles, rows_of_tile


def mixture_of_experts(call: ExpertsCall, operands: ExpertsOperands) -> Float[Array, "T D"]:
    """Rows are read where they are, weights in place; what experts return is kept for some columns at a time."""
    if call.num_tokens == 0:
        return operands.x
    weights, chosen = operands.weights, operands.chosen
    if call.routing is not None:
        weights, chosen = routed(added(operands.logits), call.routing, operands.choice_bias)
    groups = group_by_expert(chosen, call.num_experts, rows_of_tile(call), rows_of_choices=call.weighs_inputs)
    rows = weighed_rows(operands.x, weights.T) if call.weighs_inputs else operands.x
    hidden = _hidden(call, ProductOperands.of_first(operands, groups, rows))
    second = ProductOperands.of_second(operands, groups, hidden)
    return _returned(call, second, groups, None if call.weighs_inputs else weights.T)


def _hidden(call: ExpertsCall, operands: ProductOperands) -> Float[Array, "S F"]:
    """Each slot's hidden units; the activation is XLA's where inputs are split, or the kernel has not what it needs."""
    assert operands.sources is not None
    sizes, num_slots = product_tiles(call, depth=call.hidden_size, columns=2 * call.units), len(operands.sources)
    steps = steps_of(call.activation)
    if steps is not None and sizes.splits == 1:
        return grouped_product(operands, sizes, num_slots=num_slots, steps=steps)
    sums = jnp.sum(grouped_product(operands, sizes, num_slots=num_slots, in_parts=True), axis=0)
    return call.activation(*jnp.split(sums, 2, axis=1)).astype(operands.x.dtype)


def _returned(
    call: ExpertsCall, operands: ProductOperands, groups: ExpertGroups, weights: Float[Array, "k T"] | None
) -> Float[Array, "T D"]:
    """The weighted sum of what each slot's expert returns."""
    sizes, num_slots = product_tiles(call, depth=call.units, columns=call.hidden_size), len(groups.sources)

    def product(operands: ProductOperands, columns: slice) -> Float[Array, "S columns"]:
        in_parts = sizes.splits > 1
        out = grouped_product(operands, sizes, num_slots=num_slots, columns=columns, in_parts=in_parts)
        return jnp.sum(out, axis=0).astype(operands.x.dtype) if in_parts else out

    out_type = jax.ShapeDtypeStruct((num_slots, call.hidden_size), operands.x.dtype)
    return sum_in_pieces(product, operands, groups.slots, weights, out_type=out_type)
