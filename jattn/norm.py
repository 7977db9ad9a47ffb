"""Norms of the residual stream and of heads, as models use them."""

from jattn_kernels import HeadNorms, add_rms_norm, normed_heads, rms_norm

__all__ = ["HeadNorms", "add_rms_norm", "normed_heads", "rms_norm"]
