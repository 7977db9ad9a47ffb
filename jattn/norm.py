"""Norms of the residual stream and of heads, as models use them."""

from jattn_kernels import HeadNorms, normed_heads, rms_norm

__all__ = ["HeadNorms", "normed_heads", "rms_norm"]
