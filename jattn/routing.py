"""Routing of tokens to experts, as models use it."""

from jattn_kernels import Routing, route

__all__ = ["Routing", "route"]
