"""SGLang's FlashAttention backend over jattn's kernels."""

from jattn.flash_attention.backend import FlashAttentionBackend
from jattn.flash_attention.config import CudaGraphState, FlashAttentionConfig, cdiv, spec_of
from jattn.flash_attention.metadata import FlashAttentionMetadata
from jattn.flash_attention.multi_step import FlashAttentionMultiStepBackend
from jattn.local_attention import make_local_attention_virtual_batches

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
