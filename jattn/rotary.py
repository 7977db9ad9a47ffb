"""Rotary embedding: the angles of a pass, and the turning of heads by them."""

from jaxtyping import Array, Float32

from jattn_kernels import rotate

Angles = tuple[Float32[Array, "T half"], Float32[Array, "T half"]]  # cosines and sines

__all__ = ["Angles", "rotate"]
