"""A mixture of experts on Hopper: rows in order, two grouped products, and the weighted sum."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.call import ExpertsCall
from jattn_kernels.lowering.expert_groups import group_by_expert, most_slots, weighed_rows, weighted_sum
from jattn_kernels.mosaic.sm90.experts.grouped_product import ProductOperands, grouped_product
from jattn_kernels.mosaic.sm90.experts.tile_sizes import product_tiles
from jattn_kernels.operands import ExpertsOperands

_MOST_BYTES = 96 * 2**20  # of what experts return, before it is summed
_PIECE_COLUMNS = 256


def mixture_of_experts(call: ExpertsCall, operands: ExpertsOperands) -> Float[Array, "T D"]:
    """Rows are read where they are, weights in place; what experts return is kept for some columns at a time."""
    sizes = product_tiles(call)
    groups = group_by_expert(operands.chosen, call.num_experts, sizes.block_rows, rows_of_choices=call.weighs_inputs)
    num_slots = most_slots(call.num_tokens, call.per_token, call.num_experts)
    layer = operands.layer_index.reshape(1)
    hidden = grouped_product(
        ProductOperands(
            x=weighed_rows(operands.x, operands.weights) if call.weighs_inputs else operands.x,
            sources=groups.sources,
            kernel=operands.gate_up,
            bias=operands.gate_up_bias,
            layer=layer,
            work=groups.work,
            num_tiles=groups.num_tiles,
        ),
        sizes,
        num_slots=num_slots,
        activation=call.activation,
    )
    second = ProductOperands(
        x=hidden,
        sources=None,
        kernel=operands.down,
        bias=operands.down_bias,
        layer=layer,
        work=groups.work,
        num_tiles=groups.num_tiles,
    )
    weights = None if call.weighs_inputs else operands.weights
    parts = []
    for columns in _pieces(num_slots, call):
        returned = grouped_product(second, sizes, num_slots=num_slots, columns=columns)
        part = weighted_sum(returned, groups.slots, weights)
        parts.append(part)
        # The next part begins when this one is summed: so its memory is this one's.
        second, part = jax.lax.optimization_barrier((second, part))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _pieces(num_slots: int, call: ExpertsCall) -> list[slice]:
    """The columns that are computed together."""
    width = call.hidden_size
    most = max(_MOST_BYTES // (num_slots * 2) // _PIECE_COLUMNS, 1) * _PIECE_COLUMNS
    return [slice(begin, min(begin + most, width)) for begin in range(0, width, most)]
