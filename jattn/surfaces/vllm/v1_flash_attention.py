"""vLLM v1's flash_attn backend over its utilities: one call for decodes and prefills, irope by virtual batches."""

import dataclasses
import functools
import typing
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jattn.arguments import check_fields, check_whole, in_words, instance, integers, whole
from jattn.local_attention import pad_local_attention_virtual_batches
from jattn.surfaces.vllm import v0_impl
from jattn.surfaces.vllm.v0_metadata import AttentionType
from jattn.surfaces.vllm.v1 import AttentionMetadataBuilder, CommonAttentionMetadata, VllmConfig, get_kv_cache_layout

__all__ = [
    "FlashAttentionImpl",
    "FlashAttentionMetadata",
    "FlashAttentionMetadataBuilder",
    "KVCacheSpec",
]


@dataclasses.dataclass(frozen=True)
class KVCacheSpec:
    """What the builder reads of a layer's cache: tokens a page.

    Raises:
        ValueError: There are none.
    """

    block_size: int

    def __post_init__(self):
        check_whole(self, "block_size")


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashAttentionMetadata:
    """What attention reads of a batch; padded rows and tokens as in CommonAttentionMetadata.

    Attributes:
        num_actual_tokens: Tokens of the bucket.
        max_query_len: Bound on a request's tokens; with 1 and a token a row, the batch is all decodes.
        query_start_loc, seq_lens, block_table, slot_mapping: As in CommonAttentionMetadata.
        local_query_start_loc, local_seqused_k, local_block_table: The same of the chunks as requests of their own; None
            if the model has no layers that attend within chunks.
    """

    num_actual_tokens: int = dataclasses.field(metadata={"static": True})
    max_query_len: int = dataclasses.field(metadata={"static": True})
    query_start_loc: Int[Array, " B+1"]
    seq_lens: Int[Array, " B"]
    block_table: Int[Array, "B max_pages"]
    slot_mapping: Int[Array, " T"]
    local_query_start_loc: Int[Array, " V+1"] | None = None
    local_seqused_k: Int[Array, " V"] | None = None
    local_block_table: Int[Array, "V pages_a_chunk"] | None = None


class FlashAttentionMetadataBuilder(AttentionMetadataBuilder[FlashAttentionMetadata]):
    """Makes what FlashAttentionImpl reads; chunks are cut here, once for all layers."""

    def __init__(self, kv_cache_spec: KVCacheSpec, vllm_config: VllmConfig, device: Any = None):
        check_fields("kv_cache_spec", kv_cache_spec, "block_size")
        check_fields("vllm_config", vllm_config, "attention_chunk_size")
        super().__init__(kv_cache_spec, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """Metadata of a batch; jit-able. The prefix and `fast_build` are accepted for vLLM's sake and ignored.

        Raises:
            ValueError: The chunk size is no multiple of the block size, or an array is none of integers or of another
                number of requests.
        """
        instance("common_attn_metadata", common_attn_metadata, CommonAttentionMetadata)
        common, chunk_size = common_attn_metadata, self.vllm_config.attention_chunk_size
        starts = integers("query_start_loc", common.query_start_loc, "requests + 1")
        lens = integers("seq_lens", common.seq_lens, "requests")
        table = integers("block_table_tensor", common.block_table_tensor, "requests", "max_blocks")
        slots = integers("slot_mapping", common.slot_mapping, "tokens")
        rows = len(starts) - 1, len(lens), len(table)
        if set(rows) != {common.num_reqs}:
            raise ValueError(
                "`query_start_loc` must have an entry more than `num_reqs`, `seq_lens` and `block_table_tensor` a row "
                f"for each. Got num_reqs={common.num_reqs} and {rows[0]}, {rows[1]} and {rows[2]} requests."
            )
        local = {}
        if chunk_size is not None:
            whole("num_actual_tokens", common.num_actual_tokens)
            _, local_starts, local_lens, local_table = pad_local_attention_virtual_batches(
                chunk_size, starts, lens, table, self.kv_cache_spec.block_size, common.num_actual_tokens
            )
            local = {
                "local_query_start_loc": local_starts,
                "local_seqused_k": local_lens,
                "local_block_table": local_table,
            }
        return FlashAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=starts,
            seq_lens=lens,
            block_table=table,
            slot_mapping=slots,
            **local,
        )


class FlashAttentionImpl(v0_impl.FlashAttentionImpl):
    """Attention of one kind of layer; static and hashable. Its cache has the axes of `get_kv_cache_layout`.

    Raises:
        ValueError: A value contradicts its rule.
        NotImplementedError: The layer is no decoder's own.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"v1 has decoders only: use `jattn.vllm.v0`. Got attn_type={self.attn_type!r}.")

    def forward(
        self,
        layer: v0_impl.AttentionLayer,
        query: Float[Array, "T N H"],
        key: Float[Array, "T K H"] | None,
        value: Float[Array, "T K H"] | None,
        kv_cache: Float[Array, "..."] | None,
        attn_metadata: Any,
        output: Float[Array, "T N H"] | None = None,
        output_scale: Float[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "T N H"], Float[Array, "..."] | None]:
        """Writes this pass's keys and values, then attends. The cache may be donated.

        Args:
            key, value: Both None to read only what is cached.
            output: Accepted for vLLM's sake and ignored: the output is returned.
            output_scale: Refused.

        Returns:
            The output, 0 for padded tokens, and the cache.

        Raises:
            ValueError: Arguments do not belong together.
            NotImplementedError: `output_scale` is given.
        """
        instance("attn_metadata", attn_metadata, FlashAttentionMetadata)
        metadata, layout = attn_metadata, get_kv_cache_layout()
        query, key, value, kv_cache = self.checked(layer, query, key, value, kv_cache)
        v0_impl.refuse_output_scale(output_scale)
        if kv_cache is None or query.shape[0] != metadata.num_actual_tokens:
            raise ValueError(
                f"`kv_cache` must be given, and a query for each of the {metadata.num_actual_tokens} tokens. "
                f"Got query.shape={query.shape}."
            )
        if self.use_irope and metadata.local_block_table is None:
            raise ValueError("`attention_chunk_size` of the configuration must be given to a layer with `use_irope`.")
        # As v0's words, but for these two.
        with in_words(block_tables="block_table", seq_lens_tensor="seq_lens"):
            return self._served_from_pages(layer, query, key, value, kv_cache, metadata, layout)

    def _served_from_pages(self, layer, query, key, value, kv_cache, metadata: Any, layout) -> tuple[Any, Any]:
        kv_cache = self.save(layer, key, value, kv_cache, metadata.slot_mapping, layout)
        table, lens, starts = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
        if self.use_irope:
            table, lens, starts = metadata.local_block_table, metadata.local_seqused_k, metadata.local_query_start_loc
        decodes = metadata.max_query_len == 1 and lens.shape[0] == metadata.num_actual_tokens
        starts = None if decodes else starts
        return self.attend_pages(layer, query, kv_cache, table, lens, starts, self.spec(None, layout)), kv_cache
