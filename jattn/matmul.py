"""Products with weights, as models use them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn_kernels import (
    NextProduct,
    QuantizedKernel,
    QuantizedRows,
    Splits,
    Unattended,
    UnattendedLatents,
    Ungated,
    Unmultiplied,
    added,
    adds_up,
    dequantize_groups,
    in_shape_of,
    interleave,
    is_one_kernel,
    matmul,
    matmul_gated,
    matmul_gated_of_sum,
    matmul_splits,
    matmul_splits_of_sum,
    mlp_of_sum,
    multiplied,
    quantize_groups,
    quantize_kernel,
    rows_of_room,
    with_bias,
)
from jattn_kernels.mxfp4 import GROUP as MXFP4_GROUP
from jattn_kernels.mxfp4 import dequantize_mxfp4
from jattn_kernels.quantized import FP8, INT4, MXFP4, NUMBERS_OF_BYTE
from jattn_kernels.unattended import attended_at_once

__all__ = [
    "FP8",
    "INT4",
    "MXFP4",
    "MXFP4_GROUP",
    "NUMBERS_OF_BYTE",
    "NextProduct",
    "QuantizedKernel",
    "QuantizedRows",
    "Splits",
    "Unattended",
    "UnattendedLatents",
    "Ungated",
    "Unmultiplied",
    "added",
    "adds_up",
    "attended_at_once",
    "dequantize_groups",
    "dequantize_mxfp4",
    "in_shape_of",
    "interleave",
    "is_one_kernel",
    "matmul",
    "matmul_gated",
    "matmul_gated_of_sum",
    "matmul_splits",
    "matmul_splits_of_sum",
    "mlp_of_sum",
    "multiplied",
    "precision",
    "quantize_groups",
    "quantize_kernel",
    "rows_of_room",
    "with_bias",
]


def precision(x: Array) -> jax.lax.Precision | None:
    """What a product of x asks of the device, so that float32 stays float32."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
