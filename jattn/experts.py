"""Mixtures of experts, as models use them."""

from jattn_kernels import routed_experts

__all__ = ["routed_experts"]
