"""SGLang's FlashAttention backend over jattn's kernels."""

from jattn.attention.specs import spec_of
from jattn.local_attention import make_local_attention_virtual_batches
from jattn.surfaces.cuda_graph_state import CudaGraphState
from jattn.surfaces.sglang.backend import FlashAttentionBackend
from jattn.surfaces.sglang.config import FlashAttentionConfig, cdiv
from jattn.surfaces.sglang.metadata import FlashAttentionMetadata
from jattn.surfaces.sglang.multi_step import FlashAttentionMultiStepBackend

__all__ = [
    "CudaGraphState",
    "FlashAttentionBackend",
    "FlashAttentionConfig",
    "FlashAttentionMetadata",
    "FlashAttentionMultiStepBackend",
    "cdiv",
    "make_local_attention_virtual_batches",
    "spec_of",
]
