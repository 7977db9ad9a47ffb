"""Mixtures of experts, as models use them."""

from jattn_kernels import are_multiplied_by_a_kernel, mixture_of_experts, routed_experts, routed_experts_of_sum
from jattn_kernels.unattended import Pages

__all__ = ["Pages", "are_multiplied_by_a_kernel", "mixture_of_experts", "routed_experts", "routed_experts_of_sum"]
