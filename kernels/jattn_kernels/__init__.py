"""Attention kernels over paged and ragged keys: pure functions of arrays."""

from jattn_kernels.attention import make_schedule, paged_decode, paged_extend, ragged_extend
from jattn_kernels.merge import merge_state, merge_states
from jattn_kernels.pages import copy_pages, write_pages
from jattn_kernels.spec import AttentionSpec

__all__ = [
    "AttentionSpec",
    "copy_pages",
    "make_schedule",
    "merge_state",
    "merge_states",
    "paged_decode",
    "paged_extend",
    "ragged_extend",
    "write_pages",
]
