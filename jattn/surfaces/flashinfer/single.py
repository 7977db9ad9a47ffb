"""FlashInfer's functions over one sequence's keys and values: no plan, and jit-able."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jattn.arguments import array, in_words, scale_arrays, shown
from jattn.dtype_names import named_dtype
from jattn.surfaces.flashinfer.layer_facts import alibi_slopes, attention_spec, page_layout
from jattn.surfaces.flashinfer.wrapper import AttentionResult
from jattn_kernels import lse_to_base2, ragged_extend


def single_decode_with_kv_cache(
    q: Float[Array, "N H"],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    *,
    implementation: str | None = None,
) -> AttentionResult:
    """Attention of one query over its sequence's keys, the last of which is at its position; jit-able.

    Args:
        k, v: [S, K, H] if NHD, [K, S, H] if HND.
        use_tensor_cores: Accepted and not used: the kernels choose.
        Others: As in `BatchDecodeWithPagedKVCacheWrapper`.

    Returns:
        The output, and the base-2 lse if asked for.

    Raises:
        ValueError: A shape or dtype is wrong, or an argument contradicts its rule.
    """
    out, lse = _attend(
        array("q", q, "N", "H")[None],
        k,
        v,
        kv_layout=kv_layout,
        causal=True,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        scales=scale_arrays(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale),
        implementation=implementation,
    )
    return (out[0], lse_to_base2(lse[0])) if return_lse else out[0]


@in_words(q_scale="scale_q", k_scale="scale_k", v_scale="scale_v")
def single_prefill_with_kv_cache(
    q: Float[Array, "T N H"],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    o_dtype: Any = None,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    *,
    implementation: str | None = None,
) -> AttentionResult:
    """Attention of a sequence's last queries over its keys; jit-able.

    Args:
        k, v: [S, K, H] if NHD, [K, S, H] if HND.
        scale_q, scale_k, scale_v: Numbers, or arrays of one a KV head.
        o_dtype: Of the output; that of the kernels if None.
        custom_mask: Bools [T, S]; replaces the causal rule.
        packed_custom_mask: The same in bits, as `packbits` packs them with bitorder "little"; taken in its place.
        use_fp16_qk_reduction, backend: Accepted and not used: sums are float32, and dispatch chooses.
        Others: As in `BatchPrefillWithPagedKVCacheWrapper`.

    Returns:
        The output, and the base-2 lse if asked for.

    Raises:
        ValueError: A shape or dtype is wrong, or an argument contradicts its rule.
    """
    out, lse = _attend(
        array("q", q, "T", "N", "H"),
        k,
        v,
        kv_layout=kv_layout,
        custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask,
        causal=causal,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        scales=scale_arrays(q_scale=scale_q, k_scale=scale_k, v_scale=scale_v),
        implementation=implementation,
    )
    out = out if o_dtype is None else out.astype(named_dtype("o_dtype", o_dtype))
    return (out, lse_to_base2(lse)) if return_lse else out


def _attend(
    q: Array,
    k: Any,
    v: Any,
    *,
    kv_layout: str,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    pos_encoding_mode: str,
    scales: dict[str, Any],
    implementation: str | None,
    **facts: Any,
) -> tuple[Array, Array]:
    """Output and natural-log lse of queries [T, N, H], the last ones of their sequence."""
    axes = ("S", "K", "H") if page_layout(kv_layout) == "NHD" else ("K", "S", "H")
    k, v = array("k", k, *axes), array("v", v, *axes)
    if axes[0] == "K":
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    _check_sizes(q, k, v)
    spec = attention_spec(
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        head_dim_vo=v.shape[2],
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        **facts,
    )
    out, lse = ragged_extend(
        q,
        k,
        v,
        jnp.array([0, q.shape[0]], jnp.int32),
        jnp.array([0, k.shape[0]], jnp.int32),
        spec=spec,
        custom_mask=_mask(custom_mask, packed_custom_mask, q.shape[0] * k.shape[0]),
        **scales,
        alibi_slopes=alibi_slopes(pos_encoding_mode, q.shape[1]),
        implementation=implementation,
        return_lse=True,
    )
    return out, lse


def _mask(custom_mask: Any, packed_custom_mask: Any, size: int) -> Bool[Array, " M"] | None:
    """The mask of one sequence, as `masks.mask_on_host` of a batch; may be traced."""
    if packed_custom_mask is not None:
        packed = array("packed_custom_mask", packed_custom_mask, "bytes")
        if packed.dtype != jnp.uint8 or len(packed) != -(-size // 8):
            rule = f"`packed_custom_mask` must be {-(-size // 8)} bytes of uint8, a bit for each query and key."
            raise ValueError(f"{rule} Got {shown('packed_custom_mask', packed)}.")
        return jnp.unpackbits(packed, count=size, bitorder="little").astype(bool)
    if custom_mask is None:
        return None
    mask = array("custom_mask", custom_mask)
    if mask.dtype != jnp.bool_ or mask.size != size:
        raise ValueError(f"`custom_mask` must be {size} bools, [T, S]. Got {shown('custom_mask', mask)}.")
    return mask.reshape(-1)


def _check_sizes(q: Array, k: Array, v: Array) -> None:
    """Checks the sizes of queries [T, N, H] and their keys and values [S, K, H]."""
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError(f"`q`, `k` and `v` must not be empty. Got shapes {q.shape}, {k.shape}, {v.shape}.")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"`k` and `v` must have as many tokens and heads. Got {k.shape[:2]} and {v.shape[:2]} of those."
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"The heads of `q` must be a multiple of those of `k`. Got {q.shape[1]} and {k.shape[1]}.")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"`q` and `k` must have heads of one width. Got {q.shape[2]} and {k.shape[2]}.")
