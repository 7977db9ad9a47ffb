"""Products with weights, as models use them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn_kernels import (
    QuantizedKernel,
    Splits,
    added,
    dequantize_groups,
    matmul,
    matmul_splits,
    quantize_groups,
    quantize_kernel,
)
from jattn_kernels.quantized import FP8, INT4

__all__ = [
    "FP8",
    "INT4",
    "QuantizedKernel",
    "Splits",
    "added",
    "dequantize_groups",
    "matmul",
    "matmul_splits",
    "precision",
    "quantize_groups",
    "quantize_kernel",
]


def precision(x: Array) -> jax.lax.Precision | None:
    """What a product of x asks of the device, so that float32 stays float32."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
