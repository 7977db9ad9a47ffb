"""vLLM's metadata and attention as a model calls a backend, whose pool has one array of keys and values a layer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jattn.backend import AttentionLayer, BackendOptions
from jattn.forward_batch import ForwardBatch
from jattn.kv_pool import KVGroup, KVPool
from jattn.vllm import v0, v1, v1_flash_attention

HEAD_SIZE = min(v0.FlashAttentionBackend.get_supported_head_sizes())


class _VllmBackend:
    """Heads narrower than the narrowest that vLLM takes have zeros after them."""

    impl_class: type[v0.FlashAttentionImpl]

    @classmethod
    def impl(cls, layer: AttentionLayer) -> v0.FlashAttentionImpl:
        """What attends in a layer."""
        return cls.impl_class(
            num_heads=layer.tp_q_head_num,
            head_size=HEAD_SIZE,
            scale=layer.scaling,
            num_kv_heads=layer.tp_k_head_num,
            alibi_slopes=None,
            sliding_window=None if layer.sliding_window_size < 0 else layer.sliding_window_size + 1,
            kv_cache_dtype="auto",
            logits_soft_cap=layer.logit_cap,
            attn_type="encoder_decoder" if layer.is_cross_attention else "decoder",
            use_irope=layer.chunk_size is not None,
        )

    def forward_extend(self, q, k, v, layer, forward_batch, metadata, pool, save_kv_cache=True) -> tuple[Any, KVPool]:
        groups, index = list(pool.groups), layer.layer_id
        caches = groups[layer.group].k
        padding = ((0, 0), (0, 0), (0, HEAD_SIZE - layer.head_dim))
        wide = (None if x is None else jnp.pad(x, padding) for x in (q, k, v))
        cache = jax.lax.dynamic_index_in_dim(caches, index, keepdims=False)
        out, cache = self.impl(layer).forward(v0.AttentionLayer(), *wide, cache, metadata)
        caches = jax.lax.dynamic_update_index_in_dim(caches, cache, index, axis=0)
        groups[layer.group] = dataclasses.replace(groups[layer.group], k=caches)
        return out[..., : layer.head_dim], KVPool(tuple(groups))

    forward_decode = forward_extend


@dataclasses.dataclass(frozen=True)
class VllmV0Backend(_VllmBackend):
    """A batch is all prefills or all decodes, and any has an encoder."""

    max_context_len: int
    impl_class = v0.FlashAttentionImpl

    @classmethod
    def for_model(cls, layers: tuple[AttentionLayer, ...], options: BackendOptions) -> "VllmV0Backend":
        return cls(options.max_context_len)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> v0.FlashAttentionMetadata:
        rows, tokens, longest = forward_batch.batch_size, forward_batch.input_ids.shape[0], self.max_context_len
        is_decode, encoder_slots = forward_batch.forward_mode.is_decode(), forward_batch.encoder_out_cache_loc
        encoder_slots = jnp.zeros(0, jnp.int32) if encoder_slots is None else encoder_slots
        return v0.FlashAttentionMetadata(
            num_prefills=0 if is_decode else rows,
            num_prefill_tokens=0 if is_decode else tokens,
            num_decode_tokens=tokens if is_decode else 0,
            slot_mapping=forward_batch.out_cache_loc[0],
            multi_modal_placeholder_index_maps=None,
            enable_kv_scales_calculation=False,
            seq_lens=None,
            seq_lens_tensor=forward_batch.seq_lens,
            max_prefill_seq_len=0 if is_decode else longest,
            max_decode_seq_len=longest if is_decode else 0,
            context_lens_tensor=forward_batch.extend_prefix_lens,
            block_tables=forward_batch.page_tables[0],
            use_cuda_graph=False,
            max_query_len=1 if is_decode else tokens,
            max_decode_query_len=1,
            query_start_loc=forward_batch.cu_q_lens,
            seq_start_loc=_starts(forward_batch.seq_lens),
            encoder_seq_lens_tensor=forward_batch.encoder_lens,
            encoder_seq_start_loc=_starts(forward_batch.encoder_lens),
            max_encoder_seq_len=longest,
            num_encoder_tokens=encoder_slots.shape[0],
            cross_slot_mapping=encoder_slots,
            cross_block_tables=forward_batch.encoder_page_table,
        )


@dataclasses.dataclass(frozen=True)
class VllmV1Backend(_VllmBackend):
    """Any batch of decoders.

    Attributes:
        builder: Makes the metadata.
    """

    builder: v1_flash_attention.FlashAttentionMetadataBuilder
    impl_class = v1_flash_attention.FlashAttentionImpl

    @classmethod
    def for_model(cls, layers: tuple[AttentionLayer, ...], options: BackendOptions) -> "VllmV1Backend":
        (chunk_size,) = {layer.chunk_size for layer in layers if layer.chunk_size} or {None}
        impls = {str(number): cls.impl(layer) for number, layer in enumerate(layers)}
        spec, config = v1_flash_attention.KVCacheSpec(options.page_size), v1.VllmConfig(impls, chunk_size)
        return cls(v1_flash_attention.FlashAttentionMetadataBuilder(spec, config))

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> v1_flash_attention.FlashAttentionMetadata:
        tokens = forward_batch.input_ids.shape[0]
        common = v1.CommonAttentionMetadata(
            query_start_loc=forward_batch.cu_q_lens,
            seq_lens=forward_batch.seq_lens,
            num_reqs=forward_batch.batch_size,
            num_actual_tokens=tokens,
            max_query_len=1 if forward_batch.forward_mode.is_decode() else tokens,
            block_table_tensor=forward_batch.page_tables[0],
            slot_mapping=forward_batch.out_cache_loc[0],
        )
        return self.builder.build(0, common)


OVER_VLLM = {"vllm_v0": VllmV0Backend, "vllm_v1": VllmV1Backend}


def _starts(lens: Any) -> Any:
    return jnp.pad(jnp.cumsum(lens, dtype=jnp.int32), (1, 0))


def in_one_array(pool: KVPool) -> KVPool:
    """A pool as vLLM has it, zeroed, with as many pages as another."""

    def group(given: KVGroup) -> KVGroup:
        layers, *pages, _ = given.k.shape
        keys_and_values = jnp.zeros((layers, 2, *pages, HEAD_SIZE), given.k.dtype)
        return KVGroup(k=keys_and_values, v=None, name=given.name, page_layout="NHD")

    return KVPool(tuple(map(group, pool.groups)))
