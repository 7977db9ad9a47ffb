"""Products of few rows that XLA takes a slow way for, made products of some more."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.call import MatmulCall

_LEAST_ROWS = 8  # of a product of bfloat16 into float32 that goes to the tensor cores
# Numbers of a kernel below which XLA makes a product of one row a sum of vectors: it takes three times as long, 28.6 us
# against 8.2 for [4096, 2048] on an H200. (`ShouldStrengthReduceDotToReduce`; [2400, 4096] is one, [2448, 4096] not.)
_LEAST_OF_A_PRODUCT = 10_000_000


def is_made_a_sum(call: MatmulCall) -> bool:
    """Whether XLA would make of a product of few bits a sum of vectors."""
    return call.num_rows == 1 and call.depth * call.columns < _LEAST_OF_A_PRODUCT


def of_padded(product: Callable[[Array], Array], x: Float[Array, "T D"]) -> Float[Array, "T F"]:
    """A product of at least 8 rows; did it see which of them are taken, XLA would multiply those alone."""
    rows = x.shape[0]
    if rows >= _LEAST_ROWS:
        return product(x)
    return jax.lax.optimization_barrier(product(jnp.pad(x, ((0, _LEAST_ROWS - rows), (0, 0)))))[:rows]
