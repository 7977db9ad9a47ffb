"""What the builder of vLLM v0's metadata reads: its input builder, and groups of sequences."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.arguments import check_whole, instance
from jattn.surfaces.vllm.v0_impl import FlashAttentionImpl


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputBuilder:
    """What the builder reads of vLLM's input builder and runner.

    Attributes:
        block_size: Tokens a page.
        max_model_len: Longest sequence, in tokens; bounds the block tables.
        max_decode_query_len: Most tokens of a decode.
        num_prefills, num_prefill_tokens: The bucket that a batch's prefills are padded to, if it has any; None pads
            nothing, so that each batch has shapes of its own.
        max_encoder_len: Most encoder tokens of a sequence; None if the model has no encoder.
        num_encoder_tokens: The bucket of a batch's encoder tokens; None pads nothing.
        attention_chunk_size: Of layers with `use_irope`; None if there are none.
        attention_layers: The implementations whose schedules are made with a batch, once for all of its layers.
        dtype: Of the queries; None makes no schedules ahead.
        inter_data_list: The groups that `build` adds if none were added before it.

    Raises:
        ValueError: A size is below 1.
    """

    block_size: int
    max_model_len: int
    max_decode_query_len: int = 1
    num_prefills: int | None = None
    num_prefill_tokens: int | None = None
    max_encoder_len: int | None = None
    num_encoder_tokens: int | None = None
    attention_chunk_size: int | None = None
    attention_layers: tuple[FlashAttentionImpl, ...] = ()
    dtype: Any = None
    inter_data_list: list[Any] = dataclasses.field(default_factory=list, compare=False)

    def __post_init__(self):
        others = ("attention_layers", "dtype", "inter_data_list")
        for field in dataclasses.fields(self):
            if field.name not in others:
                check_whole(self, field.name, optional=field.default is None)
        for impl in self.attention_layers:
            instance("attention_layers", impl, FlashAttentionImpl)
        if (self.num_prefills is None) != (self.num_prefill_tokens is None):
            raise ValueError("`num_prefills` and `num_prefill_tokens` must be given together or both be None.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterDataForSeqGroup:
    """The sequences of one group, which are all prompts or all decodes; one entry a sequence.

    Attributes:
        is_prompt: Whether they are prefills.
        seq_ids: Names of the sequences.
        seq_lens: Their tokens, this pass's included.
        query_lens: This pass's tokens.
        context_lens: Those before.
        block_tables: Pages of each sequence by its name; None in a profile run, which writes and reads no cache.
        encoder_seq_len: Encoder tokens of the group.
        cross_block_table: Their pages.
        multi_modal_placeholder_maps: By modality, vLLM's map of where in the batch its embeddings go; None if none.
    """

    is_prompt: bool
    seq_ids: list[int]
    seq_lens: list[int]
    query_lens: list[int]
    context_lens: list[int]
    block_tables: dict[int, list[int]] | None
    encoder_seq_len: int = 0
    cross_block_table: list[int] | None = None
    multi_modal_placeholder_maps: Mapping[str, Any] | None = None
