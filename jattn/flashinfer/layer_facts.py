"""FlashInfer's words for a layer's static facts, turned into jattn's."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jattn_kernels.spec import AttentionSpec

POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
ROPE_SCALE, ROPE_THETA = 1.0, 1e4


def attention_spec(
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_layout: str,
    causal: bool,
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    head_dim_vo: int | None = None,
) -> AttentionSpec:
    """A layer's facts; a window of -1 and a cap of 0 or None are off, and RoPE's numbers count in ROPE_LLAMA only.

    Raises:
        ValueError: A fact contradicts its rule or another one, or `pos_encoding_mode` is unknown.
    """
    if pos_encoding_mode not in POS_ENCODING_MODES:
        raise ValueError(
            f"`pos_encoding_mode` must be one of {', '.join(POS_ENCODING_MODES)}. Got {pos_encoding_mode!r}."
        )
    rotary = pos_encoding_mode == "ROPE_LLAMA"
    return AttentionSpec(
        num_q_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim_vo,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap or None,
        causal=causal,
        window_left=None if window_left == -1 else window_left,
        rope_theta=(ROPE_THETA if rope_theta is None else rope_theta) if rotary else None,
        rope_scale=(ROPE_SCALE if rope_scale is None else rope_scale) if rotary else 1.0,
        page_layout=page_layout(kv_layout),
    )


def page_layout(kv_layout: str) -> Literal["NHD", "HND"]:
    """`kv_layout`, known to be one of the two.

    Raises:
        ValueError: It is not.
    """
    if kv_layout == "NHD":
        return "NHD"
    if kv_layout == "HND":
        return "HND"
    raise ValueError(f"`kv_layout` must be NHD or HND. Got {kv_layout!r}.")


def alibi_slopes(pos_encoding_mode: str, num_heads: int) -> Float[Array, " N"] | None:
    """The slopes of ALiBi (Press et al.), as FlashInfer has them: 2^(-8 i / n) for the n first heads, n the largest
    power of two; the other heads take every second slope of twice as many. None in another mode."""
    if pos_encoding_mode != "ALIBI":
        return None
    n = 1 << (num_heads.bit_length() - 1)
    first = 2.0 ** (-8.0 * np.arange(1, n + 1) / n)
    others = 2.0 ** (-4.0 * np.arange(1, 2 * (num_heads - n), 2) / n)
    return jnp.asarray(np.concatenate([first, others]), jnp.float32)


def data_types(q_data_type: Any, kv_data_type: Any, data_type: Any = None) -> tuple[str, str]:
    """Names of the queries' and the keys' dtypes.

    The deprecated `data_type` is that of both where the others have their defaults; queries stay as they are if it is
    fp8.
    """
    q_dtype = jnp.dtype("float16" if q_data_type is None else q_data_type)
    if data_type is None:
        return q_dtype.name, q_dtype.name if kv_data_type is None else jnp.dtype(kv_data_type).name
    both = jnp.dtype(data_type)
    if q_dtype == jnp.float16 and jnp.finfo(both).bits > 8:
        q_dtype = both
    return q_dtype.name, both.name if kv_data_type is None else jnp.dtype(kv_data_type).name


def scale_array(scale: Any) -> Float[Array, "..."] | None:
    """A scale as kernels take it: a number, an array of one for each KV head, or None."""
    return None if scale is None else jnp.asarray(scale, jnp.float32)
