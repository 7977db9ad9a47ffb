"""Names of what a KV cache stores, as users of engines know them."""

from typing import Any

import jax.numpy as jnp

KV_CACHE_DTYPES: dict[str, str | None] = {
    "auto": None,
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def check_kv_cache_dtype(kv_cache_dtype: str) -> None:
    """Checks that a name is known.

    Raises:
        ValueError: It is not.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"`kv_cache_dtype` must be one of {', '.join(KV_CACHE_DTYPES)}. Got {kv_cache_dtype!r}.")


def is_fp8(kv_cache_dtype: str) -> bool:
    """Whether a known name is one of fp8."""
    return kv_cache_dtype.startswith("fp8")


def stored_dtype(kv_cache_dtype: str, dtype: Any) -> Any:
    """The dtype of a pool beside queries of `dtype`, which is also what "auto" stores.

    Raises:
        ValueError: The name is unknown, or is neither fp8 nor that of `dtype`: kernels read no such mixture.
    """
    check_kv_cache_dtype(kv_cache_dtype)
    stored = jnp.dtype(KV_CACHE_DTYPES[kv_cache_dtype] or dtype)
    if stored != jnp.dtype(dtype) and not is_fp8(kv_cache_dtype):
        raise ValueError(
            "`kv_cache_dtype` must be auto, one of fp8, or the dtype that the model computes in, "
            f"{jnp.dtype(dtype).name}. Got {kv_cache_dtype!r}."
        )
    return stored
