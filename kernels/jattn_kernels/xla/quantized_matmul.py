"""Products with weights in fp8, both sides of which stay in fp8 as far as XLA's own product."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jattn_kernels.call import Device, MatmulCall
from jattn_kernels.operands import MatmulOperands
from jattn_kernels.quantized import quantize_rows
from jattn_kernels.xla.padded_rows import is_made_a_sum, of_padded

_LEAST_CAPABILITY = (8, 9)  # of a GPU whose tensor cores multiply fp8


def quantized_matmul(call: MatmulCall, operands: MatmulOperands) -> Float[Array, "T F"]:
    """Rows in fp8 times weights in fp8, summed in float32, times both scales; cast once."""
    values, scales = (
        jax.lax.dynamic_index_in_dim(stack, operands.layer_index, keepdims=False)
        for stack in (operands.kernel, operands.scales)
    )
    if call.scales == "block":
        return _of_blocks(call, operands.x, values, scales).astype(call.out_dtype)
    if operands.row_scales is None:
        rows, row_scales = quantize_rows(operands.x)
    else:
        rows, row_scales = operands.x[: call.num_rows], operands.row_scales[: call.num_rows, None]
    return _of_channels(call, rows, row_scales, values, scales).astype(call.out_dtype)


def _of_channels(
    call: MatmulCall,
    rows: Float[Array, "T D"],
    row_scales: Float32[Array, "T 1"],
    values: Float[Array, "F D"],
    scales: Float32[Array, "F 1"],
) -> Float32[Array, "T F"]:
    product = functools.partial(fp8_product, call.device, values)
    sums = of_padded(product, rows) if is_made_a_sum(call) else product(rows)
    return sums * row_scales * scales.T


def _of_blocks(
    call: MatmulCall, x: Float[Array, "T D"], values: Float[Array, "F D"], scales: Float32[Array, "SF SD"]
) -> Float32[Array, "T F"]:
    """A block's depth at a time, of which each row has a scale too."""
    depth, height = call.depth // scales.shape[1], call.columns // scales.shape[0]
    rows, row_scales = quantize_rows(x.reshape(call.num_rows, -1, depth))

    def add(block: Any, sums: Float32[Array, "T F"]) -> Float32[Array, "T F"]:
        at = functools.partial(jax.lax.dynamic_index_in_dim, index=block, axis=1)
        own = jax.lax.dynamic_slice_in_dim(values, block * depth, depth, axis=1)
        factors = at(row_scales)[:, 0] * jnp.repeat(at(scales), height, axis=0).T
        return sums + fp8_product(call.device, own, at(rows)[:, 0]) * factors

    return jax.lax.fori_loop(0, scales.shape[1], add, jnp.zeros((call.num_rows, call.columns), jnp.float32))


def fp8_product(device: Device, values: Float[Array, "F D"], rows: Float[Array, "T D"]) -> Float32[Array, "T F"]:
    """The sums of products, which are exact in bfloat16 and more so in what a CPU makes of them.

    Both operands have the depth last: XLA makes of such a product one of cuBLAS's in fp8.
    """
    capability = device.compute_capability
    if device.platform == "gpu" and (capability is None or capability < _LEAST_CAPABILITY):
        # Behind a barrier, as XLA takes a conversion to fewer bits and back for nothing.
        rows, values = jax.lax.optimization_barrier(rows).astype(jnp.bfloat16), values.astype(jnp.bfloat16)
    return jax.lax.dot_general(rows, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
