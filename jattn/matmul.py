"""Products with weights, as models use them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn_kernels import QuantizedKernel, matmul, quantize_kernel
from jattn_kernels.quantized import FP8

__all__ = ["FP8", "QuantizedKernel", "matmul", "precision", "quantize_kernel"]


def precision(x: Array) -> jax.lax.Precision | None:
    """What a product of x asks of the device, so that float32 stays float32."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
