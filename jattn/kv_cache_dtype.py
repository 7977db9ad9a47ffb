"""Names of what a KV cache stores, as users of engines know them."""

from typing import Any

from jattn.dtype_names import named_dtype

AUTO = "auto"


def cache_dtype(kv_cache_dtype: Any) -> Any | None:
    """The dtype of a name, or of a dtype; None for "auto", which leaves it to others.

    Raises:
        ValueError: The name is unknown.
    """
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype == AUTO:
        return None
    return named_dtype("kv_cache_dtype", kv_cache_dtype, also="auto, ")


def is_fp8(kv_cache_dtype: Any) -> bool:
    """Whether a known name is one of fp8."""
    dtype = cache_dtype(kv_cache_dtype)
    return dtype is not None and dtype.itemsize == 1


def stored_dtype(kv_cache_dtype: Any, dtype: Any) -> Any:
    """The dtype of a pool beside queries of `dtype`, which is also what "auto" stores.

    Raises:
        ValueError: The name is unknown, or is neither fp8 nor that of `dtype`: kernels read no such mixture.
    """
    computed = named_dtype("dtype", dtype)
    stored = cache_dtype(kv_cache_dtype) or computed
    if stored != computed and not is_fp8(kv_cache_dtype):
        raise ValueError(
            "`kv_cache_dtype` must be auto, one of fp8, or the dtype that the model computes in, "
            f"{computed.name}. Got {kv_cache_dtype!r}."
        )
    return stored
