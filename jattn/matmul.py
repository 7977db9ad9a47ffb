"""Products with weights, as models use them."""

from jattn_kernels import QuantizedKernel, matmul, quantize_kernel
from jattn_kernels.quantized import FP8

__all__ = ["FP8", "QuantizedKernel", "matmul", "quantize_kernel"]
