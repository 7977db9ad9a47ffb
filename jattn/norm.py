"""Norms of the residual stream, as models use them."""

from jattn_kernels import rms_norm

__all__ = ["rms_norm"]
