"""Reading: which of a batch's keys one layer reads, and in what form its queries go to the kernels."""

import dataclasses
from typing import Any

from jaxtyping import Array, Bool, Int

from jattn.backend import AttentionLayer
from jattn.forward_batch import ForwardMode
from jattn.surfaces.sglang.config import FlashAttentionConfig, spec_of
from jattn.surfaces.sglang.metadata import FlashAttentionMetadata
from jattn_kernels import make_schedule
from jattn_kernels.call import Operation
from jattn_kernels.spec import AttentionSpec, PageLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """The arrays of one layer's call.

    Attributes:
        operation: The kernels' face that serves it.
        spec: The layer's facts.
        page_table, seq_lens: Of the keys.
        cu_q_lens: Of ragged queries; None if each sequence has `q_len`.
        q_len: Queries a sequence; None if they are ragged.
        custom_mask, q_positions: Of a drafted tree.
    """

    operation: Operation
    spec: AttentionSpec
    page_table: Int[Array, "B max_pages"]
    seq_lens: Int[Array, " B"]
    cu_q_lens: Int[Array, " B+1"] | None
    q_len: int | None
    custom_mask: Bool[Array, " M"] | None = None
    q_positions: Int[Array, " T"] | None = None


def reading(
    layer: AttentionLayer,
    mode: ForwardMode,
    metadata: FlashAttentionMetadata,
    config: FlashAttentionConfig,
    page_layout: PageLayout = "NHD",
) -> Reading:
    """What a layer reads.

    Raises:
        ValueError: It is a layer of cross attention, and the batch has no encoder; or it has chunks of two sizes.
    """
    is_cross = layer.is_cross_attention
    local = metadata.local_attn_metadata if layer.use_irope and not is_cross else None
    # A sequence's virtual batches differ in length unless it has one query.
    is_uniform = mode.is_decode_or_idle() or mode.is_target_verify()
    q_len = metadata.max_seq_len_q if is_uniform and (local is None or metadata.max_seq_len_q == 1) else None
    starts = metadata.cu_seqlens_q
    if is_cross:
        if metadata.encoder_page_table is None or metadata.encoder_lens_int32 is None:
            raise ValueError("`is_cross_attention` needs a batch with `encoder_lens`. Got encoder_lens=None.")
        table, lens = metadata.encoder_page_table, metadata.encoder_lens_int32
    elif local is not None:
        if layer.chunk_size not in (None, config.attention_chunk_size):
            raise ValueError(
                "`chunk_size` of a layer with `use_irope` must be None or the backend's `attention_chunk_size`. "
                f"Got chunk_size={layer.chunk_size}, attention_chunk_size={config.attention_chunk_size}."
            )
        table, lens, starts = local.local_block_tables[layer.group], local.local_seqused_k, local.local_query_start_loc
    else:
        table, lens = metadata.page_tables[layer.group], metadata.cache_seqlens_int32
    ragged: Operation = "mla_extend" if config.use_mla and not is_cross else "paged_extend"
    rows: Operation = "mla_decode" if config.use_mla and not is_cross else "paged_decode"
    return Reading(
        operation=ragged if q_len is None else rows,
        spec=spec_of(layer, page_layout),
        page_table=table,
        seq_lens=lens,
        cu_q_lens=starts if q_len is None else None,
        q_len=q_len,
        custom_mask=None if is_cross else metadata.custom_mask,
        q_positions=None if is_cross else metadata.q_positions,
    )


def work_list(
    layer: AttentionLayer, mode: ForwardMode, metadata: FlashAttentionMetadata, config: FlashAttentionConfig
) -> Any:
    """The kernels' work list for a kind of layer; None where they need none, or the batch has nothing for it."""
    wanted = metadata.encoder_lens_int32 is not None if layer.is_cross_attention else metadata.custom_mask is None
    if not wanted:
        return None
    read = reading(layer, mode, metadata, config)
    return make_schedule(
        read.seq_lens,
        read.cu_q_lens,
        spec=read.spec,
        num_tokens=metadata.slots[0].shape[0] if read.q_len is None else read.q_len,
        dtype=config.dtype,
        kv_dtype=config.stored_dtype,
        page_size=config.page_size,
        operation=read.operation,
        max_seq_len=read.page_table.shape[1] * config.page_size,
        implementation=config.implementation,
    )


def kind_of(layer: AttentionLayer) -> AttentionLayer:
    """A layer without what tells it from others of its kind: those share a work list."""
    return dataclasses.replace(layer, layer_id=0, group=0, k_scale=None, v_scale=None)
