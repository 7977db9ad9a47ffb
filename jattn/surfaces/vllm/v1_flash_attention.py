"""vLLM v1's flash_attn backend over its utilities: one call for decodes and prefills, irope by virtual batches."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.arguments import check_fields, check_whole, instance, integers, whole
from jattn.attention.metadata import QueriesOverPages
from jattn.pytree import pytree, static
from jattn.surfaces.vllm import v0_impl
from jattn.surfaces.vllm.schedules import Schedules, schedules_of
from jattn.surfaces.vllm.v0_metadata import AttentionType
from jattn.surfaces.vllm.v1 import AttentionMetadataBuilder, CommonAttentionMetadata, VllmConfig, get_kv_cache_layout
from jattn.surfaces.vllm.words import V1_WORDS
from jattn_kernels import shared_prefix_decode

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


@pytree(kw_only=True)
class FlashAttentionMetadata:
    """What attention reads of a batch; padded rows and tokens as in CommonAttentionMetadata.

    Attributes:
        num_actual_tokens: Tokens of the bucket.
        max_query_len: Bound on a request's tokens; with 1 and a token a row, the batch is all decodes.
        query_start_loc, seq_lens, block_table, slot_mapping: As in CommonAttentionMetadata.
        attention_chunk_size: Of layers that attend within chunks; None if the model has none.
        prefix_len, suffix_table, suffix_lens: The tokens that all requests begin with, whole blocks, and each one's
            blocks and keys after them; None where they are not read once for all.
        schedules: Of the layers that the builder knows; None if it knows none.
    """

    num_actual_tokens: int = static()
    max_query_len: int = static()
    query_start_loc: Int[Array, " B+1"]
    seq_lens: Int[Array, " B"]
    block_table: Int[Array, "B max_pages"]
    slot_mapping: Int[Array, " T"]
    attention_chunk_size: int | None = static(default=None)
    prefix_len: Int[Array, ""] | None = None
    suffix_table: Int[Array, "B max_pages"] | None = None
    suffix_lens: Int[Array, " B"] | None = None
    schedules: Schedules | None = None

    @property
    def read(self) -> QueriesOverPages:
        """What attention reads."""
        decodes = self.max_query_len == 1 and self.seq_lens.shape[0] == self.num_actual_tokens
        return QueriesOverPages(
            page_table=self.block_table,
            seq_lens=self.seq_lens,
            cu_q_lens=None if decodes else self.query_start_loc,
            q_len=1 if decodes else None,
        )


class FlashAttentionMetadataBuilder(AttentionMetadataBuilder[FlashAttentionMetadata]):
    """Makes what FlashAttentionImpl reads; chunks are cut here, once for all layers."""

    def __init__(self, kv_cache_spec: KVCacheSpec, vllm_config: VllmConfig, device: Any = None):
        check_fields("kv_cache_spec", kv_cache_spec, "block_size")
        check_fields("vllm_config", vllm_config, "attention_chunk_size")
        super().__init__(kv_cache_spec, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """Metadata of a batch; jit-able.

        Args:
            common_prefix_len: Tokens that all requests begin with and that were computed before this pass. In a batch
                of decodes alone the whole blocks among them are read once for all, unless `fast_build`.

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
        if chunk_size is not None and chunk_size % self.kv_cache_spec.block_size:
            raise ValueError(
                "`attention_chunk_size` must be a multiple of `block_size`. "
                f"Got attention_chunk_size={chunk_size}, block_size={self.kv_cache_spec.block_size}."
            )
        metadata = FlashAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=starts,
            seq_lens=lens,
            block_table=table,
            slot_mapping=slots,
            attention_chunk_size=chunk_size,
        )
        prefix_len = whole("common_prefix_len", common_prefix_len, 0)
        if prefix_len >= self.kv_cache_spec.block_size and not fast_build and metadata.read.q_len == 1:
            return self._with_prefix(metadata, prefix_len)
        config, layout = self.vllm_config, get_kv_cache_layout()
        impls = [impl for impl in config.attention_layers.values() if isinstance(impl, v0_impl.FlashAttentionImpl)]
        block_size = self.kv_cache_spec.block_size
        kinds = schedules_of(impls, config.dtype, chunk_size, block_size, layout)
        made = None if kinds is None else kinds.over(metadata.read, common.num_actual_tokens)
        return dataclasses.replace(metadata, schedules=made)

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Any batch may run in a compiled step, as lengths are data."""
        return True

    def _with_prefix(self, metadata: FlashAttentionMetadata, prefix_len: int) -> FlashAttentionMetadata:
        pages = prefix_len // self.kv_cache_spec.block_size
        whole_blocks, table = pages * self.kv_cache_spec.block_size, metadata.block_table
        return dataclasses.replace(
            metadata,
            prefix_len=jnp.asarray(whole_blocks, jnp.int32),
            suffix_table=jnp.pad(table[:, pages:], ((0, 0), (0, min(pages, table.shape[1])))),
            suffix_lens=jnp.maximum(metadata.seq_lens - whole_blocks, 0),
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

    def _words(self) -> dict[str, str]:
        return V1_WORDS

    def _checked_metadata(self, attn_metadata: Any) -> Any:
        instance("attn_metadata", attn_metadata, FlashAttentionMetadata)
        return attn_metadata

    def _served(
        self,
        layer: v0_impl.AttentionLayer,
        query: Array,
        key: Array | None,
        value: Array | None,
        kv_cache: Any,
        metadata: FlashAttentionMetadata,
    ) -> tuple[Float[Array, "T N H"], Float[Array, "..."] | None]:
        rows, tokens = query.shape[0], metadata.num_actual_tokens
        if kv_cache is None or rows < tokens:
            raise ValueError(
                f"`kv_cache` must be given, and a query for each of the {tokens} tokens. Got query.shape={query.shape}."
            )
        if self.use_irope and metadata.attention_chunk_size is None:
            raise ValueError("`attention_chunk_size` of the configuration must be given to a layer with `use_irope`.")
        if rows > tokens:
            query = query[:tokens]
        if key is not None and value is not None and key.shape[0] > tokens:
            key, value = key[:tokens], value[:tokens]
        layout = get_kv_cache_layout()
        kv_cache = self.save(layer, key, value, kv_cache, metadata.slot_mapping, layout)
        spec = self.spec(metadata.attention_chunk_size if self.use_irope else None, layout)
        if metadata.prefix_len is None:
            out = self._attend(layer, query, kv_cache, metadata.read, spec, metadata.schedules)
        else:
            prefix: Any = (metadata.block_table[0], metadata.prefix_len, metadata.suffix_table, metadata.suffix_lens)
            options = self._options(layer, query)
            out: Any = shared_prefix_decode(query[:, None], kv_cache, None, *prefix, spec=spec, **options)
            out = out[:, 0]
        return jnp.pad(out, ((0, rows - tokens), (0, 0), (0, 0))), kv_cache
