"""Kernels of inference: attention over paged and ragged keys, and what stands around it. Pure functions of arrays."""

from jattn_kernels.attention import make_schedule, paged_decode, paged_extend, ragged_extend
from jattn_kernels.experts import are_multiplied_by_a_kernel, mixture_of_experts, routed_experts
from jattn_kernels.experts_of_sum import routed_experts_of_sum
from jattn_kernels.filters import kept_tokens
from jattn_kernels.head_norms import HeadNorms, normed_heads
from jattn_kernels.int4 import dequantize_groups, interleave, quantize_groups
from jattn_kernels.latent_write import absorb_and_write, mla_write
from jattn_kernels.matmul import (
    adds_up,
    matmul,
    matmul_gated,
    matmul_gated_of_sum,
    matmul_splits,
    matmul_splits_of_sum,
    multiplied,
    with_bias,
)
from jattn_kernels.merge import lse_from_base2, lse_to_base2, merge_state, merge_states
from jattn_kernels.mla import mla_decode, mla_extend
from jattn_kernels.mlp_of_sum import is_one_kernel, mlp_of_sum
from jattn_kernels.mlp_operands import rows_of_room
from jattn_kernels.norm import add_rms_norm, rms_norm, summed_and_normed, taken
from jattn_kernels.pages import copy_pages, read_latent_pages, write_latent_pages, write_pages
from jattn_kernels.quantized import NormedRows, QuantizedKernel, QuantizedRows, quantize_kernel, quantize_rows
from jattn_kernels.raw_latents import RawLatents
from jattn_kernels.raw_queries import RawQueries
from jattn_kernels.rotary import rotate_and_write
from jattn_kernels.rotation import rotate
from jattn_kernels.routing import route
from jattn_kernels.routing_spec import Routing
from jattn_kernels.shared_prefix import shared_prefix_decode, shared_prefix_schedule
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.splits import Splits, added, in_shape_of
from jattn_kernels.temperature import over_temperature
from jattn_kernels.unattended import Unattended
from jattn_kernels.unattended_latents import UnattendedLatents
from jattn_kernels.ungated import Ungated
from jattn_kernels.unmultiplied import NextProduct, Unmultiplied
from jattn_kernels.unnormed import Unnormed

__all__ = [
    "AttentionSpec",
    "HeadNorms",
    "NextProduct",
    "NormedRows",
    "QuantizedKernel",
    "QuantizedRows",
    "RawLatents",
    "RawQueries",
    "Routing",
    "Splits",
    "Unattended",
    "UnattendedLatents",
    "Ungated",
    "Unmultiplied",
    "Unnormed",
    "absorb_and_write",
    "add_rms_norm",
    "added",
    "adds_up",
    "are_multiplied_by_a_kernel",
    "copy_pages",
    "dequantize_groups",
    "in_shape_of",
    "interleave",
    "is_one_kernel",
    "kept_tokens",
    "lse_from_base2",
    "lse_to_base2",
    "make_schedule",
    "matmul",
    "matmul_gated",
    "matmul_gated_of_sum",
    "matmul_splits",
    "matmul_splits_of_sum",
    "merge_state",
    "merge_states",
    "mixture_of_experts",
    "mla_decode",
    "mla_extend",
    "mla_write",
    "mlp_of_sum",
    "multiplied",
    "normed_heads",
    "over_temperature",
    "paged_decode",
    "paged_extend",
    "quantize_groups",
    "quantize_kernel",
    "quantize_rows",
    "ragged_extend",
    "read_latent_pages",
    "rms_norm",
    "rotate",
    "rotate_and_write",
    "route",
    "routed_experts",
    "routed_experts_of_sum",
    "rows_of_room",
    "shared_prefix_decode",
    "shared_prefix_schedule",
    "summed_and_normed",
    "taken",
    "with_bias",
    "write_latent_pages",
    "write_pages",
]
