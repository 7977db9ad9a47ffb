"""vLLM v1's metadata and attention as a model calls a backend, whose pool has one array of keys and values a layer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jattn.backend import AttentionLayer, BackendOptions
from jattn.forward_batch import ForwardBatch
from jattn.kv_pool import KVGroup, KVPool
from jattn.vllm import v0, v1, v1_flash_attention

HEAD_SIZE = min(v0.FlashAttentionBackend.get_supported_head_sizes())


@dataclasses.dataclass(frozen=True)
class VllmV1Backend:
    """Heads narrower than the narrowest that vLLM takes have zeros after them.

    Attributes:
        builder: Makes the metadata.
    """

    builder: v1_flash_attention.FlashAttentionMetadataBuilder

    @classmethod
    def for_model(cls, layers: tuple[AttentionLayer, ...], options: BackendOptions) -> "VllmV1Backend":
        impls = {str(number): impl_of(layer) for number, layer in enumerate(layers)}
        (chunk_size,) = {layer.chunk_size for layer in layers if layer.chunk_size} or {None}
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

    def forward_extend(self, q, k, v, layer, forward_batch, metadata, pool, save_kv_cache=True) -> tuple[Any, KVPool]:
        group = pool.groups[layer.group]
        cache = jax.lax.dynamic_index_in_dim(group.k, layer.layer_id, keepdims=False)
        wide = (jnp.pad(x, ((0, 0), (0, 0), (0, HEAD_SIZE - layer.head_dim))) for x in (q, k, v))
        out, cache = impl_of(layer).forward(v0.AttentionLayer(), *wide, cache, metadata)
        caches = jax.lax.dynamic_update_index_in_dim(group.k, cache, layer.layer_id, axis=0)
        return out[..., : layer.head_dim], KVPool((dataclasses.replace(group, k=caches),))

    forward_decode = forward_extend


def impl_of(layer: AttentionLayer) -> v1_flash_attention.FlashAttentionImpl:
    """What attends in a layer."""
    return v1_flash_attention.FlashAttentionImpl(
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


def in_one_array(pool: KVPool) -> KVPool:
    """A pool as vLLM has it, zeroed, with as many pages as another of one group."""
    (group,) = pool.groups
    layers, *pages, _ = group.k.shape
    keys_and_values = jnp.zeros((layers, 2, *pages, HEAD_SIZE), group.k.dtype)
    return KVPool((KVGroup(k=keys_and_values, v=None, name=group.name, page_layout="NHD"),))
