"""FlashAttentionMetadata of vLLM v0: a batch of prefills, then decodes, then padding."""

import dataclasses
import enum
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jattn.arguments import array, instance, integers, whole
from jattn.attention.metadata import QueriesOverPages
from jattn.pytree import pytree, static
from jattn.surfaces.vllm.schedules import Schedules

PAD_SLOT_ID = -1
# The axes of lengths and places, of which those that begin with rows or tokens are cut to those of a part.
_ON_HOST = dict.fromkeys(("seq_lens", "encoder_seq_lens"), ("rows",))
_AXES = {
    "slot_mapping": ("tokens",),
    "seq_lens_tensor": ("rows",),
    "context_lens_tensor": ("rows",),
    "block_tables": ("rows", "max_blocks"),
    "query_start_loc": ("rows + 1",),
    "seq_start_loc": ("rows + 1",),
    "encoder_seq_lens_tensor": ("rows",),
    "encoder_seq_start_loc": ("rows + 1",),
    "cross_slot_mapping": ("encoder_tokens",),
    "cross_block_tables": ("rows", "max_encoder_blocks"),
}


class AttentionType(enum.StrEnum):
    """Who asks whom: a decoder itself, an encoder itself, one without a decoder, a decoder its encoder."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@pytree()
class ModelInput:
    """What `advance_step` changes of a model's input.

    Attributes:
        input_tokens: Token ids.
        input_positions: Absolute positions.
    """

    input_tokens: Int[Array, " T"]
    input_positions: Int[Array, " T"]


@pytree()
class FlashAttentionMetadata:
    """Lengths and places of a batch: its prefills' rows and tokens first, then its decodes'.

    Counts and maxima are a bucket's sizes, static, and so is which fields are None. A padded row has length 0, a padded
    token slot -1. Padded tokens end the prefills' part and the decodes' part: decodes' tokens begin at
    `num_prefill_tokens`, whatever `query_start_loc` counts before them.

    Attributes:
        num_prefills: Rows of prefills.
        num_prefill_tokens: Tokens of prefills.
        num_decode_tokens: Tokens of decodes.
        slot_mapping: Where each token's key and value go.
        multi_modal_placeholder_index_maps: Carried for the model; attention does not read it.
        enable_kv_scales_calculation: Carried for the layer, which may then calculate its scales; not read here.
        seq_lens: `seq_lens_tensor` on the host, for the host's own use.
        seq_lens_tensor: Keys of each row, this pass's included.
        max_prefill_seq_len, max_decode_seq_len: Bounds on these, in tokens.
        context_lens_tensor: Keys of each row from before this pass.
        block_tables: Pages of each row.
        use_cuda_graph: Whether the batch is padded to a bucket.
        max_query_len: Bound on the tokens of a prefill or decode.
        max_decode_query_len: Bound on the tokens of a decode; with 1, decodes have one token a row.
        query_start_loc: Where each row's real tokens begin, counted without padded ones.
        seq_start_loc: Running sum of `seq_lens_tensor`.
        _cached_prefill_metadata, _cached_decode_metadata: What `prefill_metadata` and `decode_metadata` return if set.
        encoder_seq_lens: `encoder_seq_lens_tensor` on the host.
        encoder_seq_lens_tensor: Encoder tokens of each row.
        encoder_seq_start_loc: Running sum of these.
        max_encoder_seq_len: Bound on them.
        num_encoder_tokens: Of this pass's prefills.
        cross_slot_mapping: Where each of these tokens' key and value go.
        cross_block_tables: Pages of each row's encoder tokens.
        attention_chunk_size: Of layers with `use_irope`; vLLM has it in its model's configuration.
        prefill_schedules, decode_schedules: Of the layers that the builder knows; None if it knows none.
    """

    num_prefills: int = static()
    num_prefill_tokens: int = static()
    num_decode_tokens: int = static()
    slot_mapping: Int[Array, " T"]
    multi_modal_placeholder_index_maps: dict[str, Any] | None
    enable_kv_scales_calculation: bool = static()
    seq_lens: Int[np.ndarray, " B"] | None
    seq_lens_tensor: Int[Array, " B"] | None
    max_prefill_seq_len: int = static()
    max_decode_seq_len: int = static()
    context_lens_tensor: Int[Array, " B"] | None
    block_tables: Int[Array, "B max_pages"] | None
    use_cuda_graph: bool = static()
    max_query_len: int | None = static(default=None)
    max_decode_query_len: int | None = static(default=None)
    query_start_loc: Int[Array, " B+1"] | None = None
    seq_start_loc: Int[Array, " B+1"] | None = None
    _cached_prefill_metadata: "FlashAttentionMetadata | None" = None
    _cached_decode_metadata: "FlashAttentionMetadata | None" = None
    encoder_seq_lens: Int[np.ndarray, " B"] | None = None
    encoder_seq_lens_tensor: Int[Array, " B"] | None = None
    encoder_seq_start_loc: Int[Array, " B+1"] | None = None
    max_encoder_seq_len: int | None = static(default=None)
    num_encoder_tokens: int | None = static(default=None)
    cross_slot_mapping: Int[Array, " Te"] | None = None
    cross_block_tables: Int[Array, "B max_encoder_pages"] | None = None
    attention_chunk_size: int | None = static(default=None)
    prefill_schedules: Schedules | None = None
    decode_schedules: Schedules | None = None

    @property
    def is_all_encoder_attn_metadata_set(self) -> bool:
        """All that encoder attention reads is there; the host's copy of the lengths is not needed."""
        needed = (self.encoder_seq_lens_tensor, self.encoder_seq_start_loc, self.max_encoder_seq_len)
        return all(field is not None for field in needed)

    @property
    def is_all_cross_attn_metadata_set(self) -> bool:
        """All that encoder and cross attention read is there."""
        needed = (self.cross_slot_mapping, self.cross_block_tables)
        return self.is_all_encoder_attn_metadata_set and all(field is not None for field in needed)

    @property
    def prefill_metadata(self) -> "FlashAttentionMetadata | None":
        """The metadata of the prefills alone; None without any."""
        if self.num_prefills == 0:
            return None
        if self._cached_prefill_metadata is not None:
            return self._cached_prefill_metadata
        tokens = slice(0, self.num_prefill_tokens)
        none = {"num_decode_tokens": 0, "max_decode_query_len": 0, "max_decode_seq_len": 0, "use_cuda_graph": False}
        return self._part(slice(0, self.num_prefills), tokens, _cached_decode_metadata=None, **none)

    @property
    def decode_metadata(self) -> "FlashAttentionMetadata | None":
        """The metadata of the decodes alone; None without any."""
        if self.num_decode_tokens == 0:
            return None
        if self._cached_decode_metadata is not None:
            return self._cached_decode_metadata
        tokens = slice(self.num_prefill_tokens, None)
        none = {"num_prefills": 0, "num_prefill_tokens": 0, "max_prefill_seq_len": 0, "_cached_prefill_metadata": None}
        others = {"multi_modal_placeholder_index_maps": None, "max_query_len": self.max_decode_query_len}
        return self._part(slice(self.num_prefills, None), tokens, **none, **others)

    def _part(self, rows: slice, tokens: slice, **changes: Any) -> "FlashAttentionMetadata":
        """The metadata of some rows and their tokens."""
        ends = slice(rows.start, None if rows.stop is None else rows.stop + 1)
        for name, (axis, *_) in (_AXES | _ON_HOST).items():
            value = getattr(self, name)
            if value is not None and axis == "rows + 1":
                changes[name] = value[ends] - value[rows.start]
            elif value is not None and axis in ("rows", "tokens"):
                changes[name] = value[rows if axis == "rows" else tokens]
        return dataclasses.replace(self, **changes)

    def read(self, cross: bool = False) -> QueriesOverPages:
        """What the prefills or the decodes read, whose metadata this is.

        Args:
            cross: Of their encoders' keys.

        Raises:
            ValueError: The pages or the lengths are missing.
        """
        tables = self.cross_block_tables if cross else self.block_tables
        lens = self.encoder_seq_lens_tensor if cross else self.seq_lens_tensor
        if tables is None or lens is None:
            raise ValueError("`block_tables` and `seq_lens_tensor` must be given where a cache is read. Got None.")
        one_token_a_row = self.num_prefills == 0 and (self.max_decode_query_len or 1) == 1
        starts = None if one_token_a_row else self.query_start_loc
        return QueriesOverPages(page_table=tables, seq_lens=lens, cu_q_lens=starts, q_len=1 if starts is None else None)

    def advance_step(
        self,
        model_input: ModelInput,
        sampled_token_ids: Int[Array, "..."] | None,
        block_size: int,
        num_seqs: int,
        num_queries: int,
        turn_prefills_into_decodes: bool = False,
    ) -> tuple["FlashAttentionMetadata", ModelInput]:
        """Metadata and input of the next decode step; jit-able. Host copies of lengths are dropped.

        The first `num_queries` rows grow by one token, the one sampled; rows of length 0 stay empty. A token beyond its
        row of the block table is written nowhere.

        Args:
            sampled_token_ids: One a query; None keeps the input's tokens.
            block_size: Tokens a page.
            num_seqs: Rows, padded ones included.
            num_queries: Rows that are no padding.
            turn_prefills_into_decodes: The batch has prefills, which decode from now on.

        Raises:
            ValueError: The numbers do not fit the batch, or it has prefills that are not to be turned.
        """
        lens = self.seq_lens_tensor
        if lens is None or self.block_tables is None:
            raise ValueError("`advance_step` needs `seq_lens_tensor` and `block_tables`. Got None for one of them.")
        if self.num_prefills and not turn_prefills_into_decodes:
            raise ValueError(
                "`turn_prefills_into_decodes` must be set for a batch with prefills. "
                f"Got num_prefills={self.num_prefills}."
            )
        instance("model_input", model_input, ModelInput)
        for name, size in (("block_size", block_size), ("num_seqs", num_seqs), ("num_queries", num_queries)):
            whole(name, size, 0)
        if num_seqs != lens.shape[0] or not 0 <= num_queries <= num_seqs or block_size < 1:
            raise ValueError(
                f"`num_seqs` must be the batch's {lens.shape[0]} rows, `num_queries` at most that, and `block_size` at "
                f"least 1. Got num_seqs={num_seqs}, num_queries={num_queries}, block_size={block_size}."
            )
        grows = (jnp.arange(num_seqs, dtype=jnp.int32) < num_queries) & (lens > 0)
        position = jnp.maximum(lens + grows.astype(jnp.int32) - 1, 0)
        column = position // block_size
        page = jnp.take_along_axis(self.block_tables, column[:, None], axis=1, mode="clip")[:, 0]
        fits = grows & (column < self.block_tables.shape[1])
        tokens, positions = model_input.input_tokens[:num_seqs], model_input.input_positions[:num_seqs]
        if sampled_token_ids is not None:
            sampled = array("sampled_token_ids", sampled_token_ids).reshape(-1)[:num_queries].astype(tokens.dtype)
            tokens = jnp.where(grows, jnp.pad(sampled, (0, num_seqs - sampled.shape[0])), tokens)
        lens = lens + grows.astype(jnp.int32)
        metadata = dataclasses.replace(
            self,
            num_prefills=0,
            num_prefill_tokens=0,
            num_decode_tokens=num_seqs,
            slot_mapping=jnp.where(fits, page * block_size + position % block_size, PAD_SLOT_ID),
            seq_lens=None,
            seq_lens_tensor=lens,
            max_prefill_seq_len=0,
            max_decode_seq_len=max(self.max_prefill_seq_len, self.max_decode_seq_len),
            context_lens_tensor=jnp.maximum(lens - 1, 0),
            max_query_len=1,
            max_decode_query_len=1,
            query_start_loc=jnp.arange(num_seqs + 1, dtype=jnp.int32),
            seq_start_loc=jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)]),
            _cached_prefill_metadata=None,
            _cached_decode_metadata=None,
            prefill_schedules=None,
        )
        kinds = self.decode_schedules or self.prefill_schedules
        if kinds is not None:
            metadata = dataclasses.replace(metadata, decode_schedules=kinds.over(metadata.read(), num_seqs))
        return metadata, ModelInput(tokens, jnp.where(grows, position.astype(positions.dtype), positions))


def checked_metadata(attn_metadata: FlashAttentionMetadata) -> FlashAttentionMetadata:
    """Metadata as a user gave it, its lengths and places as arrays of int32.

    Raises:
        ValueError: It is none, or a field is not what it must be.
    """
    instance("attn_metadata", attn_metadata, FlashAttentionMetadata)
    given = {name: getattr(attn_metadata, name) for name in _AXES if getattr(attn_metadata, name) is not None}
    return dataclasses.replace(attn_metadata, **{name: integers(name, given[name], *_AXES[name]) for name in given})


def _get_causal_option(attn_type: str) -> bool:
    """Whether the type of attention is causal: the decoder's is."""
    return attn_type == AttentionType.DECODER


def _get_query_key_seq_metadata(
    attn_metadata: FlashAttentionMetadata, is_prompt: bool, attn_type: str
) -> tuple[Array | None, int | None, Array | None, int | None]:
    """Start locations and bound of the queries' sequences, then of the keys', which are not paged.

    Queries start at `query_start_loc`: vLLM takes `seq_start_loc`, which is the same where nothing is cached.

    Raises:
        AttributeError: The type of attention is unknown.
    """
    metadata = attn_metadata
    max_seq_len = metadata.max_prefill_seq_len if is_prompt else metadata.max_decode_seq_len
    encoder = metadata.encoder_seq_start_loc, metadata.max_encoder_seq_len
    match attn_type:
        case AttentionType.DECODER | AttentionType.ENCODER_ONLY:
            return metadata.query_start_loc, max_seq_len, metadata.seq_start_loc, max_seq_len
        case AttentionType.ENCODER_DECODER:
            return metadata.query_start_loc, max_seq_len, *encoder
        case AttentionType.ENCODER:
            return *encoder, *encoder
        case _:
            raise AttributeError(f"`attn_type` must be one of {', '.join(AttentionType)}. Got {attn_type!r}.")
