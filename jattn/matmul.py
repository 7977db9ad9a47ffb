"""Products with weights, as models use them."""

from jattn_kernels import matmul

__all__ = ["matmul"]
