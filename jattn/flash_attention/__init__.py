"""SGLang's FlashAttention backend over jattn's kernels."""

from jattn.flash_attention.backend import FlashAttentionBackend
from jattn.flash_attention.config import CudaGraphState, FlashAttentionConfig, cdiv, spec_of
from jattn.flash_attention.metadata import FlashAttentionMetadata, LocalAttentionMetadata
from jattn.flash_attention.multi_step import FlashAttentionMultiStepBackend

__all__ = [
    "CudaGraphState",
    "FlashAttentionBackend",
    "FlashAttentionConfig",
    "FlashAttentionMetadata",
    "FlashAttentionMultiStepBackend",
    "LocalAttentionMetadata",
    "cdiv",
    "spec_of",
]
