"""Mixtures of experts, as models use them."""

from jattn_kernels import mixture_of_experts, routed_experts

__all__ = ["mixture_of_experts", "routed_experts"]
