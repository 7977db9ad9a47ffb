"""What the backends of SGLang and pymllm share: checks of a layer's call, its words; and what they save."""

from typing import Any

from jattn.arguments import array, instance
from jattn.attention.layer import AttentionLayer
from jattn.forward_batch import ForwardBatch
from jattn.kv_pool import KVPool

# What the kernels' names are called in a call of a backend.
WORDS = {
    "k_pages": "pool",
    "v_pages": "pool",
    "slots": "out_cache_loc",
    "layer_index": "layer.layer_id",
    "num_q_heads": "layer.tp_q_head_num",
    "num_kv_heads": "layer.tp_k_head_num",
    "head_dim": "layer.head_dim",
    "v_head_dim": "layer.v_head_dim",
    "sm_scale": "layer.scaling",
    "logits_soft_cap": "layer.logit_cap",
    "window_left": "layer.sliding_window_size",
    "k_scale": "layer.k_scale",
    "v_scale": "layer.v_scale",
    "kv_scale": "layer.k_scale",
    "sinks": "layer.sinks",
    "cache_k": "k",
    "cache_v": "v",
    "loc": "out_cache_loc",
}


def checked_rows(q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, pool: Any) -> tuple[Any, Any, Any]:
    """What a layer's call hands over, `q`, `k` and `v` as JAX's arrays by head; the last two may be None.

    Raises:
        ValueError: An argument is of another type or shape than the layer says.
    """
    instance("layer", layer, AttentionLayer)
    instance("forward_batch", forward_batch, ForwardBatch)
    instance("pool", pool, KVPool)
    if layer.group >= len(pool.groups):
        raise ValueError(f"`layer.group` must be one of the {len(pool.groups)} groups of `pool`. Got {layer.group}.")
    q, k, v = (
        _by_head(q, layer.tp_q_head_num, layer.head_dim),
        _by_head(k, layer.tp_k_head_num, layer.head_dim),
        _by_head(v, layer.tp_v_head_num, layer.v_head_dim),
    )
    q = array("q", q, "tokens", "heads", "head_dim")
    if q.shape[1:] != (layer.tp_q_head_num, layer.head_dim):
        raise ValueError(
            f"`q` must be [tokens, {layer.tp_q_head_num}, {layer.head_dim}], the layer's heads. Got q.shape={q.shape}."
        )
    k, v = (x if x is None else array(name, x, "tokens", "heads", "head_dim") for name, x in (("k", k), ("v", v)))
    return q, k, v


def _by_head(x: Any, heads: int, width: int) -> Any:
    """Rows with an axis of heads, where these lie one after the other as the engines have them."""
    flat = getattr(x, "ndim", None) == 2 and x.shape[1] == heads * width
    return x.reshape(-1, heads, width) if flat else x


def as_given(out: Any, q: Any) -> Any:
    """A layer's output with an axis of heads if its queries have one."""
    return out.reshape(out.shape[0], -1) if q.ndim == 2 else out


def saved(
    pool: KVPool, layer: AttentionLayer, forward_batch: ForwardBatch, slots_of_groups: Any, k: Any, v: Any
) -> KVPool:
    """The pool with a pass's keys and values, if it has any: a decoder's at its own slots, an encoder's at the batch's.

    Args:
        slots_of_groups: Of each group of the pool.

    Raises:
        ValueError: Only one of `k` and `v` is given, or the slots are missing.
    """
    if (k is None) != (v is None):
        raise ValueError("`k` and `v` must be given together or both be None.")
    if k is None:
        return pool
    slots = forward_batch.encoder_out_cache_loc if layer.is_cross_attention else slots_of_groups[layer.group]
    if slots is None:
        raise ValueError("`encoder_out_cache_loc` must be given where an encoder's keys are saved. Got None.")
    return pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)
