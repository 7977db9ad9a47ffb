"""FlashAttentionMetadata: what the kernels read about a batch by SGLang's names, and what only its users read."""

from jaxtyping import Array, Int

from jattn.attention.metadata import AttentionMetadata
from jattn.pytree import pytree, static


@pytree(kw_only=True)
class FlashAttentionMetadata(AttentionMetadata):
    """Lengths and places of a batch. Static fields are a bucket's bounds, never this batch's maxima.

    Which fields are None follows from the backend's configuration and from what the batch has, never from its values.

    Attributes:
        max_seq_len_q, max_seq_len_k: Bounds, in tokens; static.
        cu_seqlens_q: Where each sequence's queries begin.
        cu_seqlens_k: Where its keys would, one after the other.
        window_size: The model's window, (left, right), own key not counted; static, (-1, -1) is none.
        encoder_cu_seqlens_k, encoder_max_seq_len_k, encoder_lens_int32: The same of the encoder's keys.
        local_attn_metadata: The chunks that layers with `use_irope` keep to.
        Others: As in AttentionMetadata.
    """

    @pytree(kw_only=True)
    class LocalAttentionMetadata:
        """Chunked local attention as virtual batches, one a request and chunk.

        Attributes:
            local_query_start_loc: Where each virtual batch's queries begin.
            local_seqused_k: Its keys; 0 where it is padding.
            local_block_tables: Its pages, for each group of the pool.
            local_max_query_len, local_max_seq_len: Static bounds of those that have keys, in tokens.
        """

        local_query_start_loc: Int[Array, " V+1"]
        local_seqused_k: Int[Array, " V"]
        local_block_tables: tuple[Int[Array, "V chunk_pages"], ...]
        local_max_query_len: int = static()
        local_max_seq_len: int = static()

        @property
        def local_block_table(self) -> Int[Array, "V chunk_pages"]:
            """The pages in the pool's first group."""
            return self.local_block_tables[0]

    max_seq_len_q: int = static(default=0)
    max_seq_len_k: int = static(default=0)
    cu_seqlens_q: Int[Array, " B+1"]
    cu_seqlens_k: Int[Array, " B+1"]
    window_size: tuple[int, int] = static(default=(-1, -1))
    encoder_cu_seqlens_k: Int[Array, " B+1"] | None = None
    encoder_max_seq_len_k: int = static(default=0)
    encoder_lens_int32: Int[Array, " B"] | None = None
    local_attn_metadata: LocalAttentionMetadata | None = None

    @property
    def cache_seqlens_int32(self) -> Int[Array, " B"]:
        """Keys of each sequence, this pass's tokens included; 0 is padding."""
        return self.seq_lens

    @property
    def page_table(self) -> Int[Array, "B max_pages"]:
        """The pages in the pool's first group."""
        return self.page_tables[0]
