"""Products with weights, as models use them."""

from jattn_kernels import QuantizedKernel, Splits, added, matmul, matmul_splits, quantize_kernel

__all__ = ["QuantizedKernel", "Splits", "added", "matmul", "matmul_splits", "quantize_kernel"]
