"""The oracle: what every feature means, in NumPy and float64, one request or token at a time; it imports no kernel."""

from jattn_kernels.reference.attention import mla_decode, mla_extend, paged_decode, paged_extend, ragged_extend
from jattn_kernels.reference.experts import mixture_of_experts
from jattn_kernels.reference.filters import kept_tokens
from jattn_kernels.reference.merge import merge_state, merge_states
from jattn_kernels.reference.quantized import dequantized, matmul, quantize_rows, to_e4m3
from jattn_kernels.reference.requests import REQUESTS, Request
from jattn_kernels.reference.routing import route

__all__ = [
    "REQUESTS",
    "Request",
    "dequantized",
    "kept_tokens",
    "matmul",
    "merge_state",
    "merge_states",
    "mixture_of_experts",
    "mla_decode",
    "mla_extend",
    "paged_decode",
    "paged_extend",
    "quantize_rows",
    "ragged_extend",
    "route",
    "to_e4m3",
]
