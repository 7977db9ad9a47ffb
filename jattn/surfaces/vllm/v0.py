"""vLLM v0's flash_attn surface over jattn's kernels: its names, and FlashAttentionBackend, which knows them."""

from jattn.arguments import whole, whole_number
from jattn.surfaces.vllm.v0_blocks import copy_blocks, swap_blocks
from jattn.surfaces.vllm.v0_builder import CommonAttentionState, FlashAttentionMetadataBuilder
from jattn.surfaces.vllm.v0_impl import HEAD_SIZES, AttentionLayer, FlashAttentionImpl
from jattn.surfaces.vllm.v0_inputs import InputBuilder, InterDataForSeqGroup
from jattn.surfaces.vllm.v0_metadata import (
    PAD_SLOT_ID,
    AttentionType,
    FlashAttentionMetadata,
    ModelInput,
    _get_causal_option,
    _get_query_key_seq_metadata,
)

__all__ = [
    "PAD_SLOT_ID",
    "AttentionLayer",
    "AttentionType",
    "CommonAttentionState",
    "FlashAttentionBackend",
    "FlashAttentionImpl",
    "FlashAttentionMetadata",
    "FlashAttentionMetadataBuilder",
    "InputBuilder",
    "InterDataForSeqGroup",
    "ModelInput",
    "_get_causal_option",
    "_get_query_key_seq_metadata",
]


class FlashAttentionBackend:
    """Names the surface's classes, and moves blocks of caches of shape `get_kv_cache_shape`."""

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Widths of a head that are taken."""
        return list(HEAD_SIZES)

    @staticmethod
    def get_impl_cls() -> type["FlashAttentionImpl"]:
        """What attends."""
        return FlashAttentionImpl

    @staticmethod
    def get_metadata_cls() -> type[FlashAttentionMetadata]:
        """What it reads of a batch."""
        return FlashAttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """What makes that."""
        return FlashAttentionMetadataBuilder

    @staticmethod
    def get_state_cls() -> type[CommonAttentionState]:
        """What makes an example of it to compile with."""
        return CommonAttentionState

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """The shape of one layer's cache, keys then values; block 0 belongs to nobody.

        Raises:
            ValueError: `block_size` is no multiple of 16, `head_size` none of those that are taken, or another size no
                whole number of at least 1.
        """
        rule = "`block_size` must be a multiple of 16."
        if whole_number(block_size, rule, 1, 2**31) % 16:
            raise ValueError(f"{rule} Got block_size={block_size}.")
        if whole("head_size", head_size) not in HEAD_SIZES:
            raise ValueError(f"`head_size` must be one of {', '.join(map(str, HEAD_SIZES))}. Got {head_size}.")
        return 2, whole("num_blocks", num_blocks), int(block_size), whole("num_kv_heads", num_kv_heads), int(head_size)

    copy_blocks = staticmethod(copy_blocks)
    swap_blocks = staticmethod(swap_blocks)
