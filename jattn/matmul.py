"""Products with weights, as models use them."""

from jattn_kernels import QuantizedKernel, matmul, quantize_kernel

__all__ = ["QuantizedKernel", "matmul", "quantize_kernel"]
