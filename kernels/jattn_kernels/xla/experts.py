"""A mixture of experts in portable jnp: a loop over the experts that are met, some of an expert's rows at a time."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jattn_kernels.call import ExpertsCall
from jattn_kernels.lowering.expert_groups import group_by_expert, weighed_rows, weighted_sum
from jattn_kernels.lowering.routing import routed
from jattn_kernels.mixture_operands import ExpertsOperands
from jattn_kernels.mxfp4 import dequantize_mxfp4
from jattn_kernels.quantized import MXFP4
from jattn_kernels.splits import added

_MOST_ROWS = 128  # of a product: more would be spent on experts that few rows go to


def mixture_of_experts(call: ExpertsCall, operands: ExpertsOperands) -> Float[Array, "T D"]:
    """No expert is read that no row goes to, and none copied."""
    x, weights, chosen = operands.x, operands.weights, operands.chosen
    if call.num_tokens == 0:
        return x
    if call.routing is not None:
        weights, chosen = routed(added(operands.logits), call.routing, operands.choice_bias)
    block_rows = min(_MOST_ROWS, call.num_tokens)
    groups = group_by_expert(chosen, call.num_experts, block_rows, rows_of_choices=call.weighs_inputs)
    rows = weighed_rows(x, weights.T) if call.weighs_inputs else x
    sources = jnp.pad(groups.sources, (0, block_rows))
    layer, precision = operands.layer_index, jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    gate_up = operands.gate_up, operands.gate_up_scales, operands.gate_up_bias
    down = operands.down, operands.down_scales, operands.down_bias

    def product(a, kernels, scales, bias, expert):
        if scales is None:
            out = jnp.matmul(a, kernels[layer, expert], precision=precision, preferred_element_type=jnp.float32)
        else:
            wide = _dequantized(kernels[layer, expert], scales[layer, expert], x.dtype)
            out = jnp.matmul(a, wide.T, precision=precision, preferred_element_type=jnp.float32)
        return out if bias is None else out + bias[layer, expert].astype(jnp.float32)[None]

    def do_tile(number, out):
        expert, first, _ = groups.work[number]
        own = rows[jax.lax.dynamic_slice_in_dim(sources, first, block_rows)]
        gate, up = jnp.split(product(own, *gate_up, expert), 2, axis=-1)
        hidden = call.activation(gate, up).astype(x.dtype)
        returned = product(hidden, *down, expert).astype(x.dtype)
        # Rows past the expert's own stand where later tiles' will, or past the last.
        return jax.lax.dynamic_update_slice_in_dim(out, returned, first, axis=0)

    start = jnp.zeros((len(sources), call.hidden_size), x.dtype)
    out = jax.lax.fori_loop(0, groups.num_tiles[0], do_tile, start)
    return weighted_sum(out, groups.slots, None if call.weighs_inputs else weights.T)


def _dequantized(values: Shaped[Array, "F _"], scales: Shaped[Array, "_ _"], dtype: Any) -> Float[Array, "F D"]:
    """What an expert's weights stand for, rounded once to a dtype."""
    if values.dtype == MXFP4:
        return dequantize_mxfp4(values, scales, dtype)
    (outputs, inputs), (heights, depths) = values.shape, scales.shape
    blocks = values.astype(jnp.float32).reshape(heights, outputs // heights, depths, inputs // depths)
    return (blocks * scales[:, None, :, None]).reshape(values.shape).astype(dtype)
