"""FlashInfer's wrappers, and pymllm's FlashInfer backend, over jattn's kernels."""

from jattn.surfaces.flashinfer.backend import FlashInferAttnBackend
from jattn.surfaces.flashinfer.cascade import merge_state, merge_state_in_place, merge_states
from jattn.surfaces.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from jattn.surfaces.flashinfer.kv_buffers import KVBuffers
from jattn.surfaces.flashinfer.masks import packbits, segment_packbits
from jattn.surfaces.flashinfer.metadata import DecodeMetadata, PrefillMetadata, WrapperDispatch, should_use_tensor_core
from jattn.surfaces.flashinfer.multi_level import MultiLevelCascadeAttentionWrapper
from jattn.surfaces.flashinfer.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from jattn.surfaces.flashinfer.plan import PagedPlan, RaggedPlan
from jattn.surfaces.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from jattn.surfaces.flashinfer.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from jattn.surfaces.flashinfer.single import single_decode_with_kv_cache, single_prefill_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "DecodeMetadata",
    "FlashInferAttnBackend",
    "KVBuffers",
    "MultiLevelCascadeAttentionWrapper",
    "PagedPlan",
    "PrefillMetadata",
    "RaggedPlan",
    "WrapperDispatch",
    "append_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "segment_packbits",
    "should_use_tensor_core",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
]
