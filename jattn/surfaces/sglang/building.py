"""Building metadata: lengths, places and masks of each mode, as arrays of a bucket's sizes; all of it jit-able."""

import dataclasses

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from jattn.forward_batch import ForwardBatch, ForwardMode
from jattn.local_attention import pad_local_attention_virtual_batches
from jattn.spec_info import EagleDraftInput, EagleVerifyInput, SpecInput, tree_of
from jattn.surfaces.places import NOWHERE, Places, places_of
from jattn.surfaces.sglang.config import FlashAttentionConfig
from jattn.surfaces.sglang.metadata import FlashAttentionMetadata


@dataclasses.dataclass(frozen=True)
class Builder:
    """Builds a backend's metadata; static.

    Attributes:
        config: The backend's.
        step: Which draft step, from 0.
        topk: Branches a sequence; 0 and 1 are a chain.
        num_steps: Draft steps in all.
    """

    config: FlashAttentionConfig
    step: int
    topk: int
    num_steps: int

    @property
    def num_keys(self) -> int:
        """Keys that a sequence's drafts take in the pool so far; those of a tree are laid out branch by branch."""
        return self.topk * self.num_steps if self.topk > 1 else self.step + 1

    def q_len(self, mode: ForwardMode, spec_info: SpecInput | None) -> int | None:
        """Queries of every sequence; None where they are ragged.

        Raises:
            ValueError: The batch is to be verified, and the configuration does not say how many tokens a sequence.
        """
        if mode.is_target_verify():
            if self.config.speculative_num_draft_tokens is None:
                raise ValueError("`speculative_num_draft_tokens` must be given for target verify. Got None.")
            return self.config.speculative_num_draft_tokens
        if mode.is_decode_or_idle():
            return max(1, self.topk) if isinstance(spec_info, EagleDraftInput) else 1
        return None

    def num_drafted(self, batch: ForwardBatch) -> int:
        """Keys that a sequence has beyond its `seq_lens`, in drafting and in target verify."""
        if batch.forward_mode.is_target_verify():
            assert self.config.speculative_num_draft_tokens is not None
            return self.config.speculative_num_draft_tokens
        return self.num_keys if self._is_drafting(batch) else 0

    def _is_drafting(self, batch: ForwardBatch) -> bool:
        return batch.forward_mode.is_decode() and isinstance(batch.spec_info, EagleDraftInput)

    def places(self, batch: ForwardBatch) -> Places:
        """Where the batch's keys are."""
        return places_of(batch, self.config.max_context_len, self.config.page_size, self.num_drafted(batch))

    def slots(self, batch: ForwardBatch, places: Places) -> Int[Array, " T"]:
        """The slots of a batch's tokens, `q_len` for each sequence: its next places.

        A token that its row has no room for is written nowhere.
        """
        (page_table,), page_size = places.page_tables, self.config.page_size
        count = self.q_len(batch.forward_mode, batch.spec_info)
        assert count is not None
        token = jnp.arange(count, dtype=jnp.int32)[None]
        if not batch.forward_mode.is_target_verify():
            drafting = isinstance(batch.spec_info, EagleDraftInput)
            # Without drafts the only token is counted already.
            token = token * max(1, self.num_steps) + self.step if drafting else token - 1
        positions = jnp.maximum(batch.seq_lens[:, None] + token, 0)
        page = jnp.take_along_axis(page_table, positions // page_size, axis=1, mode="clip")
        room = jnp.minimum(places.room, page_table.shape[1] * page_size)
        has_place = (batch.seq_lens[:, None] > 0) & (positions < room.reshape(-1, 1))
        return jnp.where(has_place, page * page_size + positions % page_size, NOWHERE).reshape(-1)

    def build(self, batch: ForwardBatch, places: Places, slots: tuple[Int[Array, " T"], ...]) -> FlashAttentionMetadata:
        """Metadata of a batch in any mode.

        Args:
            batch: Its `cu_q_lens` is read in the modes with ragged queries only.
        """
        config, mode, seq_lens, cu_q_lens = self.config, batch.forward_mode, batch.seq_lens, batch.cu_q_lens
        q_len, added = self.q_len(mode, batch.spec_info), self.num_drafted(batch)
        if self.topk > 1 and self._is_drafting(batch):
            seq_lens = _lens_with_room(seq_lens, places.room, added)
        cache_lens = jnp.zeros_like(seq_lens) if mode.is_idle() else jnp.where(seq_lens > 0, seq_lens + added, 0)
        if q_len is not None:
            cu_q_lens = jnp.arange(batch.batch_size + 1, dtype=jnp.int32) * q_len
        mask, q_positions = self._tree(batch, seq_lens)
        window, encoder_lens, num_tokens = config.sliding_window_size, batch.encoder_lens, slots[0].shape[0]
        metadata = FlashAttentionMetadata(
            page_tables=places.page_tables,
            seq_lens=cache_lens,
            cu_q_lens=cu_q_lens if q_len is None else None,
            q_len=q_len,
            slots=slots,
            q_positions=q_positions,
            custom_mask=mask,
            encoder_page_table=places.encoder_page_table,
            encoder_lens=encoder_lens,
            max_seq_len_q=num_tokens if q_len is None else q_len,
            max_seq_len_k=config.max_context_len,
            cu_seqlens_q=cu_q_lens,
            cu_seqlens_k=_cumulative(cache_lens),
            window_size=(-1, -1) if window is None else (window, 0),
            encoder_cu_seqlens_k=None if encoder_lens is None else _cumulative(encoder_lens),
            encoder_max_seq_len_k=0 if encoder_lens is None else config.max_context_len,
            encoder_lens_int32=encoder_lens,
        )
        metadata = dataclasses.replace(metadata, local_attn_metadata=self._local(metadata))
        return config.paged_backend.with_schedules(metadata, is_mixed=mode.is_mixed())

    def _local(self, metadata: FlashAttentionMetadata) -> FlashAttentionMetadata.LocalAttentionMetadata | None:
        """Virtual batches for every group's pages; None without chunks, and for trees, which chunked layers refuse."""
        chunk_size = self.config.attention_chunk_size
        if chunk_size is None or metadata.custom_mask is not None:
            return None
        rows, sizes = (metadata.cu_seqlens_q, metadata.seq_lens), (self.config.page_size, metadata.slots[0].shape[0])
        of_groups = [
            pad_local_attention_virtual_batches(chunk_size, *rows, table, *sizes) for table in metadata.page_tables
        ]
        _, starts, lens, _ = of_groups[0]
        return FlashAttentionMetadata.LocalAttentionMetadata(
            local_query_start_loc=starts,
            local_seqused_k=lens,
            local_block_tables=tuple(table for *_, table in of_groups),
            local_max_query_len=min(chunk_size, metadata.max_seq_len_q),
            local_max_seq_len=chunk_size,
        )

    def _tree(self, batch: ForwardBatch, seq_lens: Int[Array, " B"]):
        """The mask and the positions of a drafted tree; None and None for a chain."""
        info, verify = batch.spec_info, batch.forward_mode.is_target_verify()
        if verify and isinstance(info, EagleVerifyInput) and info.custom_mask is not None:
            return tree_of(info, seq_lens, self.num_drafted(batch))
        if self._is_drafting(batch) and self.topk > 1:
            return self._branches_mask(seq_lens), jnp.repeat(seq_lens + self.step, self.topk)
        return None, None

    def _branches_mask(self, seq_lens: Int[Array, " B"]) -> Bool[Array, " M"]:
        """Each branch sees what was there before drafting, and its own tokens so far."""
        max_len = self.config.max_context_len + self.num_keys
        lens = jnp.where(seq_lens > 0, seq_lens + self.num_keys, 0)
        ends = jnp.cumsum(lens * self.topk, dtype=jnp.int32)
        place = jnp.arange(seq_lens.shape[0] * self.topk * max_len, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(ends, place, side="right"), seq_lens.shape[0] - 1)
        branch, key = jnp.divmod(place - (ends - lens * self.topk)[row], jnp.maximum(lens, 1)[row])
        drafted = key - seq_lens[row]
        own = (drafted // self.num_steps == branch) & (drafted % self.num_steps <= self.step)
        return (drafted < 0) | own


def _lens_with_room(seq_lens: Int[Array, " B"], room: Int[Array, " B"] | int, num_keys: int) -> Int[Array, " B"]:
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


def _cumulative(lens: Int[Array, " B"]) -> Int[Array, " B+1"]:
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])
