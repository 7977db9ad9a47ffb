"""Products with weights as XLA does them, so that it takes the fast way for few rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jattn_kernels.call import MatmulCall
from jattn_kernels.int4 import dequantize_groups
from jattn_kernels.operands import MatmulOperands
from jattn_kernels.quantized import QuantizedKernel
from jattn_kernels.xla.padded_rows import is_made_a_sum, of_padded
from jattn_kernels.xla.quantized_matmul import quantized_matmul


def matmul(call: MatmulCall, operands: MatmulOperands) -> Float[Array, "T F"]:
    """x @ kernel; float32 stays float32 on devices that would round it to less."""
    if call.scales in ("channel", "block"):
        return quantized_matmul(call, operands)
    x = operands.x
    kernel = _kernel_in_groups(call, operands) if call.scales == "group" else _of_layer(operands.kernel, operands)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def product(x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        return jnp.matmul(x, kernel, precision=precision, preferred_element_type=jnp.dtype(call.out_dtype))

    # For fewer rows into float32 XLA first converts the whole kernel: 1.2 ms of a step of Llama-3-8B on an H200.
    is_widened = call.out_dtype == "float32" != call.dtype
    is_a_sum = x.dtype != jnp.float32 and is_made_a_sum(call)
    return of_padded(product, x) if is_widened or is_a_sum else product(x)


def _kernel_in_groups(call: MatmulCall, operands: MatmulOperands) -> Float[Array, "D F"]:
    """A layer's weights in int4, dequantised to the dtype of the rows."""
    parts = (operands.kernel, operands.scales, operands.zero_points)
    values, scales, zero_points = jax.tree.map(lambda stack: _of_layer(stack, operands), parts)
    kernel = QuantizedKernel(values=values, scales=scales, zero_points=zero_points, interleaved=call.interleaved)
    return dequantize_groups(kernel, operands.x.dtype).T


def _of_layer(stack: Shaped[Array, "L _ _"], operands: MatmulOperands) -> Shaped[Array, "_ _"]:
    return jax.lax.dynamic_index_in_dim(stack, operands.layer_index, keepdims=False)
