"""FlashInfer's wrappers, and pymllm's FlashInfer backend, over jattn's kernels."""

from jattn.flashinfer.backend import FlashInferAttnBackend
from jattn.flashinfer.cascade import merge_state, merge_states
from jattn.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from jattn.flashinfer.kv_buffers import KVBuffers
from jattn.flashinfer.masks import packbits, segment_packbits
from jattn.flashinfer.metadata import DecodeMetadata, PrefillMetadata, WrapperDispatch, should_use_tensor_core
from jattn.flashinfer.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from jattn.flashinfer.plan import PagedPlan, RaggedPlan
from jattn.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "DecodeMetadata",
    "FlashInferAttnBackend",
    "KVBuffers",
    "PagedPlan",
    "PrefillMetadata",
    "RaggedPlan",
    "WrapperDispatch",
    "append_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_states",
    "packbits",
    "segment_packbits",
    "should_use_tensor_core",
    "single_decode_with_kv_cache",
]
