"""FlashInfer's words for a layer's static facts, turned into jattn's."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jattn.arguments import in_words, number, whole, whole_number
from jattn.dtype_names import named_dtype
from jattn.kv_cache_dtype import AUTO
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
    theta = ROPE_THETA if rope_theta is None else number("rope_theta", rope_theta)
    positions = ROPE_SCALE if rope_scale is None else number("rope_scale", rope_scale)
    cap = 0.0 if logits_soft_cap is None else number("logits_soft_cap", logits_soft_cap)
    with in_words(num_q_heads="num_qo_heads"):
        return AttentionSpec(
            num_q_heads=whole("num_qo_heads", num_qo_heads),
            num_kv_heads=whole("num_kv_heads", num_kv_heads),
            head_dim=whole("head_dim", head_dim),
            v_head_dim=None if head_dim_vo is None else whole("head_dim_vo", head_dim_vo),
            sm_scale=None if sm_scale is None else number("sm_scale", sm_scale),
            logits_soft_cap=cap or None,
            causal=bool(causal),
            window_left=_window(window_left),
            rope_theta=theta if rotary else None,
            rope_scale=positions if rotary else 1.0,
            page_layout=page_layout(kv_layout),
        )


def _window(window_left: int | None) -> int | None:
    rule = "`window_left` must be a whole number of at least 0, or -1 (off)."
    window = -1 if window_left is None else whole_number(window_left, rule, -1, 2**31)
    return None if window == -1 else window


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
    """The slopes of ALiBi (Press et al.), one a query head; None in another mode.

    2^(-8 i / n) for the first n heads, n the largest power of two; the others take every second slope of 2 n heads.
    """
    if pos_encoding_mode != "ALIBI":
        return None
    n = 1 << (num_heads.bit_length() - 1)
    first = 2.0 ** (-8.0 * np.arange(1, n + 1) / n)
    others = 2.0 ** (-4.0 * np.arange(1, 2 * (num_heads - n), 2) / n)
    return jnp.asarray(np.concatenate([first, others]), jnp.float32)


def data_types(q_data_type: Any, kv_data_type: Any, data_type: Any = None) -> tuple[str, str]:
    """Names of the queries' and the keys' dtypes.

    The deprecated `data_type` is that of both where the others have their defaults; queries stay as they are if it is
    fp8. Keys of None or "auto" have the queries'.

    Raises:
        ValueError: One means no dtype that is taken.
    """
    q_dtype = named_dtype("q_data_type", "float16" if q_data_type is None else q_data_type)
    both = None if data_type is None else named_dtype("data_type", data_type)
    if both is not None and q_dtype == jnp.float16 and both.itemsize > 1:
        q_dtype = both
    if kv_data_type is None or (isinstance(kv_data_type, str) and kv_data_type == AUTO):
        return q_dtype.name, (both or q_dtype).name
    return q_dtype.name, named_dtype("kv_data_type", kv_data_type, also="None, auto, ").name
