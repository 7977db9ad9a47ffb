"""What FlashAttentionBackend checks of a layer's call: that metadata, pool and layer belong together."""

from jattn.attention.layer import AttentionLayer
from jattn.kv_pool import KVGroup, KVPool
from jattn.surfaces.sglang.config import FlashAttentionConfig
from jattn.surfaces.sglang.metadata import FlashAttentionMetadata


def check_call(
    q, layer: AttentionLayer, metadata: FlashAttentionMetadata, pool: KVPool, config: FlashAttentionConfig, steps: int
) -> None:
    """Checks a call.

    Args:
        steps: Draft steps in all.

    Raises:
        ValueError: The queries are not the batch's tokens, or the pool not what the configuration says.
        NotImplementedError: The layer does not serve drafted trees.
    """
    tokens = metadata.slots[0].shape[0]
    if q.shape[0] != tokens:
        raise ValueError(f"`q` must have a row for each of the batch's {tokens} tokens. Got q.shape={q.shape}.")
    _check_group(pool.groups[layer.group], layer, config)
    _check_tree(layer, metadata, steps)


def _check_group(group: KVGroup, layer: AttentionLayer, config: FlashAttentionConfig) -> None:
    if (group.v is None) != (layer.kv == "latent"):
        raise ValueError(
            "`pool` must hold latent rows where `attention_arch` is MLA, and keys and values elsewhere. "
            f"Got group {group.name!r} with attention_arch={config.attention_arch}."
        )
    if group.page_size != config.page_size:
        raise ValueError(
            f"`pool` must have the configuration's pages of {config.page_size} tokens. "
            f"Got pages of {group.page_size} tokens in group {group.name!r}."
        )
    if (group.k.dtype.itemsize == 1) != config.is_fp8:
        raise ValueError(
            "`kv_cache_dtype` must say whether `pool` is stored in fp8, as scales are used only then. "
            f"Got kv_cache_dtype={config.kv_cache_dtype!r} and a pool of {group.k.dtype}."
        )


def _check_tree(layer: AttentionLayer, metadata: FlashAttentionMetadata, steps: int) -> None:
    """Refuses the rules that would read positions off a tree's keys, which are not at their positions."""
    if metadata.custom_mask is None or layer.is_cross_attention:
        return
    if layer.chunk_size is not None:
        raise NotImplementedError("Chunked layers do not serve drafted trees; draft chains, topk=1.")
    depth = max(metadata.max_seq_len_q, steps)
    if 0 <= layer.sliding_window_size < depth:
        raise NotImplementedError(
            f"`sliding_window_size` must be at least {depth}, the depth that a drafted tree may have; or draft "
            f"chains, topk=1. Got {layer.sliding_window_size}."
        )
