"""Building metadata: lengths, places and masks of each mode, as arrays of a bucket's sizes; all of it jit-able."""

import dataclasses

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from jattn.arguments import integers
from jattn.attention.metadata import AttentionMetadata
from jattn.forward_batch import ForwardBatch, ForwardMode, with_columns
from jattn.local_attention import pad_local_attention_virtual_batches
from jattn.spec_info import EagleDraftInput, EagleVerifyInput, SpecInput, tree_of
from jattn.surfaces.sglang.config import FlashAttentionConfig, cdiv
from jattn.surfaces.sglang.metadata import FlashAttentionMetadata

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
    """Where a batch's keys are: pages of the sequences and, in an encoder-decoder model, of the encoders.

    Attributes:
        room: Tokens that a row has pages for; what lies beyond, up to the tables' width, is in page 0.
    """

    page_tables: tuple[Int[Array, "B max_pages"], ...]
    encoder_page_table: Int[Array, "B max_encoder_pages"] | None = None
    room: Int[Array, " B"] | int


def places_of_requests(
    req_to_token: Int[Array, "R slots"],
    req_pool_indices: Int[Array, " B"],
    encoder_lens: Int[Array, " B"] | None,
    num_drafted: int,
    config: FlashAttentionConfig,
) -> Places:
    """Pages of requests whose token slots are known; one group.

    Args:
        num_drafted: Keys that may follow those of the longest sequence; without columns of theirs they are in page 0.

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
    rows, most = req_to_token[req_pool_indices], config.max_context_len + num_drafted
    width, held = cdiv(most, config.page_size), cdiv(req_to_token.shape[1], config.page_size) * config.page_size
    columns = jnp.arange(width, dtype=jnp.int32)[None] * config.page_size
    own = with_columns(rows[:, : most : config.page_size] // config.page_size, width)
    if encoder_lens is None:
        return Places(page_tables=(own,), room=held)
    first = -(-encoder_lens // config.page_size) * config.page_size
    slots = jnp.take_along_axis(rows, columns + first[:, None], axis=1, mode="fill", fill_value=0)
    encoder = own[:, : config.max_pages]
    return Places(page_tables=(slots // config.page_size,), encoder_page_table=encoder, room=held - first)


def places_of_tables(forward_batch: ForwardBatch, num_drafted: int, config: FlashAttentionConfig) -> Places:
    """As `places_of_requests`, of a batch that says its pages."""
    tables, width = forward_batch.page_tables, cdiv(config.max_context_len + num_drafted, config.page_size)
    return Places(
        page_tables=tuple(with_columns(table, width) for table in tables) if num_drafted else tables,
        encoder_page_table=forward_batch.encoder_page_table,
        room=min(table.shape[1] for table in tables) * config.page_size,
    )


def num_drafted(mode: ForwardMode, spec_info: SpecInput | None, drafting: Drafting, config) -> int:
    """Keys that a sequence has beyond its `seq_lens`, in drafting and in target verify."""
    if mode.is_target_verify():
        assert config.speculative_num_draft_tokens is not None
        return config.speculative_num_draft_tokens
    return drafting.num_keys if mode.is_decode() and isinstance(spec_info, EagleDraftInput) else 0


def lens_with_room(seq_lens: Int[Array, " B"], room: Int[Array, " B"] | int, num_keys: int) -> Int[Array, " B"]:
    """The lengths of rows that a drafted tree has room beside; 0, as of padding, for those where it has none.

    Raises:
        ValueError: There is such a row, and lengths and room are known outside jit.
    """
    lacks = seq_lens + num_keys > room
    if not isinstance(lacks, Tracer) and bool(jnp.any(lacks & (seq_lens > 0))):
        raise ValueError(
            f"`req_to_token` must have room for the {num_keys} keys of a drafted tree, topk * speculative_num_steps, "
            f"behind each sequence's. Got seq_lens={seq_lens.tolist()}, and room for {room} tokens."
        )
    return jnp.where(lacks, 0, seq_lens)


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
    places: Places,
    seq_lens: Int[Array, " B"],
    mode: ForwardMode,
    spec_info: SpecInput | None,
    drafting: Drafting,
    config: FlashAttentionConfig,
) -> Int[Array, " T"]:
    """The slots of a batch's tokens, `tokens_a_sequence` for each: the next places of its sequences.

    A token that its row has no room for is written nowhere.
    """
    (page_table,) = places.page_tables
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
    room = jnp.minimum(places.room, page_table.shape[1] * config.page_size)
    has_place = (seq_lens[:, None] > 0) & (positions < room.reshape(-1, 1))
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
    added = num_drafted(mode, spec_info, drafting, config)
    if drafting.topk > 1 and added and not mode.is_target_verify():
        seq_lens = lens_with_room(seq_lens, places.room, added)
    cache_lens = jnp.where(seq_lens > 0, seq_lens + added, 0)
    if mode.is_idle():
        cache_lens = jnp.zeros_like(seq_lens)
    if q_len is not None:
        cu_q_lens = jnp.arange(batch_size + 1, dtype=jnp.int32) * q_len
    assert cu_q_lens is not None
    mask, q_positions = _tree(mode, seq_lens, spec_info, drafting, config)
    window, tables, num_tokens = config.sliding_window_size, places.page_tables, slots[0].shape[0]
    attention = AttentionMetadata(
        page_tables=tables,
        seq_lens=cache_lens,
        cu_q_lens=cu_q_lens if q_len is None else None,
        q_len=q_len,
        slots=slots,
        q_positions=q_positions,
        custom_mask=mask,
        encoder_page_table=places.encoder_page_table,
        encoder_lens=encoder_lens,
    )
    return FlashAttentionMetadata(
        attention=config.paged_backend.with_schedules(attention),
        max_seq_len_q=num_tokens if q_len is None else q_len,
        max_seq_len_k=config.max_context_len,
        cu_seqlens_q=cu_q_lens,
        cu_seqlens_k=_cumulative(cache_lens),
        window_size=(-1, -1) if window is None else (window, 0),
        encoder_cu_seqlens_k=None if encoder_lens is None else _cumulative(encoder_lens),
        encoder_max_seq_len_k=0 if encoder_lens is None else config.max_context_len,
        encoder_lens_int32=encoder_lens,
        encoder_page_table=places.encoder_page_table,
        local_attn_metadata=_local(cache_lens, cu_q_lens, tables, num_tokens, q_len, mask, config),
    )


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
        return tree_of(spec_info, seq_lens, config.speculative_num_draft_tokens)
    if mode.is_decode() and isinstance(spec_info, EagleDraftInput) and drafting.topk > 1:
        positions = jnp.repeat(seq_lens + drafting.step, drafting.topk)
        return _branches_mask(seq_lens, drafting, config.max_context_len + drafting.num_keys), positions
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
