"""vLLM v0's flash_attn surface over jattn's kernels: its names, and FlashAttentionBackend, which knows them."""

from typing import Any

from jaxtyping import Array, Float

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

    @staticmethod
    def copy_blocks(
        kv_caches: list[Float[Array, "2 P page_size K H"]], src_to_dists: Any
    ) -> list[Float[Array, "2 P page_size K H"]]:
        """The caches with block src copied to block dst for each pair; all copies read what was there before.

        The caches are donated: keep what is returned.

        Args:
            src_to_dists: Pairs [n, 2] of block numbers, on the host or the device; n may be 0.

        Raises:
            ValueError: The pairs are no [n, 2], or a block is not in the caches.
        """
        return copy_blocks(kv_caches, src_to_dists)

    @staticmethod
    def swap_blocks(
        src_kv_cache: Float[Any, "2 P page_size K H"],
        dst_kv_cache: Float[Any, "2 P_dst page_size K H"],
        src_to_dst: Any,
    ) -> Float[Any, "2 P_dst page_size K H"]:
        """The destination with block src of the source at block dst for each pair, from device to host or back.

        Args:
            src_kv_cache: On the device, or a NumPy array on the host.
            dst_kv_cache: As well. Donated on the device, written in place if NumPy: keep what is returned.
            src_to_dst: As there.

        Raises:
            ValueError: The pairs are no [n, 2], a block is not in its cache, or the caches' blocks differ.
        """
        return swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst)
