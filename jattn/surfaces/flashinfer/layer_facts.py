"""FlashInfer's words for a layer's static facts, turned into jattn's."""

from collections.abc import Mapping
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


def layer_facts(given: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's `spec` and `alibi_slopes`, from the arguments of a call by their names in FlashInfer.

    A window of -1 and a cap of 0 or None are off, and RoPE's numbers count in ROPE_LLAMA only. A call that does not say
    whether it is `causal` is decode.

    Raises:
        ValueError: A fact contradicts its rule or another one, or `pos_encoding_mode` is unknown.
    """

    def real(name: str, default: float | None) -> float | None:
        return default if given[name] is None else number(name, given[name])

    mode, width = given["pos_encoding_mode"], "head_dim_qk" if "head_dim_qk" in given else "head_dim"
    if mode not in POS_ENCODING_MODES:
        raise ValueError(f"`pos_encoding_mode` must be one of {', '.join(POS_ENCODING_MODES)}. Got {mode!r}.")
    rope_theta, rope_scale = real("rope_theta", ROPE_THETA), real("rope_scale", ROPE_SCALE)
    rotary: dict[str, Any] = {"rope_theta": rope_theta, "rope_scale": rope_scale} if mode == "ROPE_LLAMA" else {}
    value_width = given.get("head_dim_vo")
    with in_words(num_q_heads="num_qo_heads", head_dim=width):
        spec = AttentionSpec(
            num_q_heads=whole("num_qo_heads", given["num_qo_heads"]),
            num_kv_heads=whole("num_kv_heads", given["num_kv_heads"]),
            head_dim=whole(width, given[width]),
            v_head_dim=None if value_width is None else whole("head_dim_vo", value_width),
            sm_scale=real("sm_scale", None),
            logits_soft_cap=real("logits_soft_cap", None) or None,
            causal=bool(given.get("causal", True)),
            window_left=_window(given["window_left"]),
            page_layout=page_layout(given["kv_layout"]),
            **rotary,
        )
    return {"spec": spec, "alibi_slopes": _alibi_slopes(spec.num_q_heads) if mode == "ALIBI" else None}


def _window(window_left: int | None) -> int | None:
    rule = "`window_left` must be a whole number of at least 0, or -1 (off)."
    window = -1 if window_left is None else whole_number(window_left, rule, -1, 2**31)
    return None if window == -1 else window


def page_layout(kv_layout: str) -> Literal["NHD", "HND"]:
    """`kv_layout`, known to be one of the two.

    Raises:
        ValueError: It is not.
    """
    if kv_layout == "NHD" or kv_layout == "HND":
        return kv_layout
    raise ValueError(f"`kv_layout` must be NHD or HND. Got {kv_layout!r}.")


def _alibi_slopes(num_heads: int) -> Float[Array, " N"]:
    """The slopes of ALiBi (Press et al.), one a query head.

    2^(-8 i / n) for the first n heads, n the largest power of two; the others take every second slope of 2 n heads.
    """
    n = 1 << (num_heads.bit_length() - 1)
    first = 2.0 ** (-8.0 * np.arange(1, n + 1) / n)
    others = 2.0 ** (-4.0 * np.arange(1, 2 * (num_heads - n), 2) / n)
    return jnp.asarray(np.concatenate([first, others]), jnp.float32)


def data_types(q_data_type: Any, kv_data_type: Any, data_type: Any) -> dict[str, str]:
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
        return {"q_dtype": q_dtype.name, "kv_dtype": (both or q_dtype).name}
    kv_dtype = named_dtype("kv_data_type", kv_data_type, also="None, auto, ")
    return {"q_dtype": q_dtype.name, "kv_dtype": kv_dtype.name}
