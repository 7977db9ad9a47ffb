"""FlashInfer's functions over one sequence's keys and values: no plan, and jit-able."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jattn.arguments import array, in_words, scale_arrays
from jattn.dtype_names import named_dtype
from jattn.surfaces.flashinfer.layer_facts import layer_facts
from jattn.surfaces.flashinfer.masks import checked_mask
from jattn.surfaces.flashinfer.plan import RaggedPlan
from jattn.surfaces.flashinfer.wrapper import AttentionResult, keys_and_values
from jattn_kernels import lse_to_base2


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
    scales = scale_arrays(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    out, lse = _attend(locals() | {"q": array("q", q, "N", "H")[None]}, **scales)
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
    scales = scale_arrays(q_scale=scale_q, k_scale=scale_k, v_scale=scale_v)
    out, lse = _attend(locals() | {"q": array("q", q, "T", "N", "H")}, **scales)
    out = out if o_dtype is None else out.astype(named_dtype("o_dtype", o_dtype))
    return (out, lse_to_base2(lse)) if return_lse else out


def _attend(given: dict[str, Any], **scales: Any) -> tuple[Array, Array]:
    """Output and natural-log lse of queries [T, N, H], the last ones of their sequence.

    Args:
        given: The arguments of a call, as `wrapper` has them.
    """
    q, (k, v) = given["q"], keys_and_values(given["k"], given["v"], given["kv_layout"])
    _check_sizes(q, k, v)
    sizes = {"num_qo_heads": q.shape[1], "num_kv_heads": k.shape[1], "head_dim": q.shape[2], "head_dim_vo": v.shape[2]}
    masks, bits = (given.get("custom_mask"), given.get("packed_custom_mask")), np.array([q.shape[0] * k.shape[0]])
    plan = RaggedPlan(
        cu_q_lens=jnp.array([0, q.shape[0]], jnp.int32),
        cu_kv_lens=jnp.array([0, k.shape[0]], jnp.int32),
        custom_mask=checked_mask(*masks, bits, read=array),
        num_tokens=q.shape[0],
        q_dtype=q.dtype.name,
        kv_dtype=k.dtype.name,
        implementation=given["implementation"],
        **layer_facts(given | sizes),
    )
    return plan.attend(q, k, v, **scales)


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
