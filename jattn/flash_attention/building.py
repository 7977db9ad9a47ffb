"""Building metadata: lengths, places and masks of each mode, as arrays of a bucket's sizes; all of it jit-able."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jattn.arguments import integers
from jattn.flash_attention.config import FlashAttentionConfig
from jattn.flash_attention.metadata import FlashAttentionMetadata
from jattn.flash_attention.reading import kind_of, work_list
from jattn.forward_batch import ForwardMode
from jattn.local_attention import pad_local_attention_virtual_batches
from jattn.spec_info import EagleDraftInput, EagleVerifyInput, SpecInput, tree_of

NOWHERE = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True)
class Drafting:
    """Where a backend stands in drafting; static.

    Attributes:
        step: Which draft step, from 0.
        topk: Branches a sequence; 0 and 1 are a chain.
        num_steps: Draft steps in all.
    """

    step: int = 0
    topk: int = 0
    num_steps: int = 0

    @property
    def branches(self) -> int:
        """Tokens of a sequence at each step."""
        return max(1, self.topk)

    @property
    def num_keys(self) -> int:
        """Keys that a sequence's drafts take in the pool so far; those of a tree are laid out branch by branch."""
        return self.topk * self.num_steps if self.topk > 1 else self.step + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Where a batch's keys are: pages of the sequences and, in an encoder-decoder model, of the encoders."""

    page_tables: tuple[Int[Array, "B max_pages"], ...]
    encoder_page_table: Int[Array, "B max_encoder_pages"] | None = None


def places_of_requests(
    req_to_token: Int[Array, "R slots"],
    req_pool_indices: Int[Array, " B"],
    encoder_lens: Int[Array, " B"] | None,
    config: FlashAttentionConfig,
) -> Places:
    """Pages of requests whose token slots are known; one group.

    Raises:
        ValueError: `req_to_token` is narrower than the longest sequence.
    """
    req_to_token = integers("req_to_token", req_to_token, "requests", "slots")
    req_pool_indices = integers("req_pool_indices", req_pool_indices, "batch_size")
    if req_to_token.shape[1] < config.max_context_len:
        raise ValueError(
            f"`req_to_token` must have at least `max_context_len`={config.max_context_len} columns. "
            f"Got req_to_token.shape={req_to_token.shape}."
        )
    rows = req_to_token[req_pool_indices]
    columns = jnp.arange(config.max_pages, dtype=jnp.int32)[None] * config.page_size
    own = rows[:, : config.max_context_len : config.page_size] // config.page_size
    if encoder_lens is None:
        return Places(page_tables=(own,))
    first = -(-encoder_lens // config.page_size) * config.page_size
    slots = jnp.take_along_axis(rows, columns + first[:, None], axis=1, mode="fill", fill_value=0)
    return Places(page_tables=(slots // config.page_size,), encoder_page_table=own)


def tokens_a_sequence(mode: ForwardMode, spec_info: SpecInput | None, drafting: Drafting, config) -> int | None:
    """Queries of every sequence; None where they are ragged.

    Raises:
        ValueError: The batch is to be verified, and the configuration does not say how many tokens a sequence.
    """
    if mode.is_target_verify():
        if config.speculative_num_draft_tokens is None:
            raise ValueError("`speculative_num_draft_tokens` must be given for target verify. Got None.")
        return config.speculative_num_draft_tokens
    if mode.is_decode_or_idle():
        return drafting.branches if isinstance(spec_info, EagleDraftInput) else 1
    return None


def slots_of_tokens(
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    mode: ForwardMode,
    spec_info: SpecInput | None,
    drafting: Drafting,
    config: FlashAttentionConfig,
) -> Int[Array, " T"]:
    """The slots of a batch's tokens, `tokens_a_sequence` for each: the next places of its sequences.

    A token beyond its row of the page table is written nowhere.
    """
    count = tokens_a_sequence(mode, spec_info, drafting, config)
    assert count is not None
    token = jnp.arange(count, dtype=jnp.int32)[None]
    if isinstance(spec_info, EagleDraftInput) and not mode.is_target_verify():
        token = token * max(1, drafting.num_steps) + drafting.step
    elif not mode.is_target_verify():
        token = token - 1  # decode: its own token is counted
    positions = jnp.maximum(seq_lens[:, None] + token, 0)
    column = positions // config.page_size
    page = jnp.take_along_axis(page_table, column, axis=1, mode="clip")
    slots = page * config.page_size + positions % config.page_size
    has_place = (seq_lens[:, None] > 0) & (column < page_table.shape[1])
    return jnp.where(has_place, slots, NOWHERE).reshape(-1)


def build(
    *,
    mode: ForwardMode,
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B+1"] | None,
    places: Places,
    slots: tuple[Int[Array, " T"], ...],
    encoder_lens: Int[Array, " B"] | None,
    spec_info: SpecInput | None,
    drafting: Drafting,
    config: FlashAttentionConfig,
) -> FlashAttentionMetadata:
    """Metadata of a batch in any mode.

    Args:
        seq_lens: As a ForwardBatch has them, so without drafted tokens.
        cu_q_lens: Read in the modes with ragged queries only.
    """
    batch_size, q_len = seq_lens.shape[0], tokens_a_sequence(mode, spec_info, drafting, config)
    cache_lens = _cache_lens(mode, seq_lens, spec_info, drafting, config)
    if q_len is not None:
        cu_q_lens = jnp.arange(batch_size + 1, dtype=jnp.int32) * q_len
    assert cu_q_lens is not None
    mask, q_positions = _tree(mode, seq_lens, spec_info, drafting, config)
    window = config.sliding_window_size
    metadata = FlashAttentionMetadata(
        cache_seqlens_int32=cache_lens,
        max_seq_len_q=slots[0].shape[0] if q_len is None else q_len,
        max_seq_len_k=config.max_context_len,
        cu_seqlens_q=cu_q_lens,
        cu_seqlens_k=_cumulative(cache_lens),
        window_size=(-1, -1) if window is None else (window, 0),
        page_tables=places.page_tables,
        encoder_cu_seqlens_k=None if encoder_lens is None else _cumulative(encoder_lens),
        encoder_max_seq_len_k=0 if encoder_lens is None else config.max_context_len,
        encoder_lens_int32=encoder_lens,
        encoder_page_table=places.encoder_page_table,
        local_attn_metadata=_local(cache_lens, cu_q_lens, places.page_tables, slots[0].shape[0], q_len, mask, config),
        slots=slots,
        schedules=(),
        custom_mask=mask,
        q_positions=q_positions,
    )
    kinds = map(kind_of, config.layers)
    return dataclasses.replace(metadata, schedules=tuple(work_list(kind, mode, metadata, config) for kind in kinds))


def _cache_lens(mode, seq_lens, spec_info, drafting: Drafting, config) -> Int[Array, " B"]:
    if mode.is_idle():
        return jnp.zeros_like(seq_lens)
    if mode.is_target_verify():
        added = config.speculative_num_draft_tokens
    elif mode.is_decode() and isinstance(spec_info, EagleDraftInput):
        added = drafting.num_keys
    else:
        return seq_lens
    return jnp.where(seq_lens > 0, seq_lens + added, 0)


def _local(cache_lens, cu_q_lens, page_tables, num_tokens: int, q_len: int | None, mask, config: FlashAttentionConfig):
    """Virtual batches for every group's pages; None without chunks, and for trees, which chunked layers refuse."""
    chunk_size = config.attention_chunk_size
    if chunk_size is None or mask is not None:
        return None
    of_groups = [
        pad_local_attention_virtual_batches(chunk_size, cu_q_lens, cache_lens, table, config.page_size, num_tokens)
        for table in page_tables
    ]
    _, starts, lens, _ = of_groups[0]
    return FlashAttentionMetadata.LocalAttentionMetadata(
        local_query_start_loc=starts,
        local_seqused_k=lens,
        local_block_tables=tuple(table for *_, table in of_groups),
        local_max_query_len=min(chunk_size, num_tokens if q_len is None else q_len),
        local_max_seq_len=chunk_size,
    )


def _cumulative(lens: Int[Array, " B"]) -> Int[Array, " B+1"]:
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])


def _tree(mode, seq_lens, spec_info, drafting: Drafting, config):
    """The mask and the positions of a drafted tree; None and None for a chain."""
    if mode.is_target_verify() and isinstance(spec_info, EagleVerifyInput) and spec_info.custom_mask is not None:
        return tree_of(spec_info, seq_lens.shape[0] * config.speculative_num_draft_tokens)
    if mode.is_decode() and isinstance(spec_info, EagleDraftInput) and drafting.topk > 1:
        positions = jnp.repeat(seq_lens + drafting.step, drafting.topk)
        return _branches_mask(seq_lens, drafting, config.max_context_len), positions
    return None, None


def _branches_mask(seq_lens: Int[Array, " B"], drafting: Drafting, max_len: int) -> Bool[Array, " M"]:
    """Each branch sees what was there before drafting, and its own tokens so far."""
    lens = jnp.where(seq_lens > 0, seq_lens + drafting.num_keys, 0)
    ends = jnp.cumsum(lens * drafting.topk, dtype=jnp.int32)
    place = jnp.arange(seq_lens.shape[0] * drafting.topk * max_len, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, place, side="right"), seq_lens.shape[0] - 1)
    branch, key = jnp.divmod(place - (ends - lens * drafting.topk)[row], jnp.maximum(lens, 1)[row])
    drafted = key - seq_lens[row]
    own = (drafted // drafting.num_steps == branch) & (drafted % drafting.num_steps <= drafting.step)
    return (drafted < 0) | own
