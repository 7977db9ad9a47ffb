"""Products with weights as XLA does them, so that it takes the fast way for few rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.call import MatmulCall
from jattn_kernels.operands import MatmulOperands

_LEAST_ROWS = 8  # of a product of bfloat16 into float32 that goes to the tensor cores
# Numbers of a kernel below which XLA makes a product of one row a sum of vectors: it takes three times as long, 28.6 us
# against 8.2 for [4096, 2048] on an H200. (`ShouldStrengthReduceDotToReduce`; [2400, 4096] is one, [2448, 4096] not.)
_LEAST_OF_A_PRODUCT = 10_000_000


def matmul(call: MatmulCall, operands: MatmulOperands) -> Float[Array, "T F"]:
    """x @ kernel; float32 stays float32 on devices that would round it to less."""
    x = operands.x
    kernel = jax.lax.dynamic_index_in_dim(operands.kernel, operands.layer_index, keepdims=False)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def product(x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        return jnp.matmul(x, kernel, precision=precision, preferred_element_type=jnp.dtype(call.out_dtype))

    # For fewer rows into float32 XLA first converts the whole kernel: 1.2 ms of a step of Llama-3-8B on an H200.
    is_widened = call.out_dtype == "float32" != call.dtype
    is_a_sum = call.num_rows == 1 and x.dtype != jnp.float32 and kernel.size < _LEAST_OF_A_PRODUCT
    return _of_padded(product, x) if is_widened or is_a_sum else product(x)


def _of_padded(product: Callable[[Array], Array], x: Float[Array, "T D"]) -> Float[Array, "T F"]:
    """A product of at least 8 rows; did it see which of them are taken, XLA would multiply those alone."""
    rows = x.shape[0]
    if rows >= _LEAST_ROWS:
        return product(x)
    return jax.lax.optimization_barrier(product(jnp.pad(x, ((0, _LEAST_ROWS - rows), (0, 0)))))[:rows]
