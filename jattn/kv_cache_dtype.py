"""Names of what a KV cache stores, as users of engines know them."""

from typing import Any

import jax.numpy as jnp

from jattn.dtype_names import named_dtype
from jattn_kernels.packed_latents import DTYPE as PACKED
from jattn_kernels.packed_latents import is_packed
from jattn_kernels.shapes.arrays import FP8

AUTO = "auto"
PACKED_LATENTS = "fp8_ds_mla"  # as vLLM names DeepSeek's: latent rows in fp8, a scale for each tile of one


def cache_dtype(kv_cache_dtype: Any, *, latents: bool = False) -> Any | None:
    """The dtype of a name, or of a dtype; None for "auto", which leaves it to others.

    Args:
        latents: Whether it may be that of packed latents, PACKED_LATENTS.

    Raises:
        ValueError: The name is unknown.
    """
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype == AUTO:
        return None
    if latents and isinstance(kv_cache_dtype, str) and kv_cache_dtype == PACKED_LATENTS:
        return jnp.dtype(PACKED)
    also = f"{AUTO}, {PACKED_LATENTS}, " if latents else f"{AUTO}, "
    return named_dtype("kv_cache_dtype", kv_cache_dtype, also=also)


def is_fp8(kv_cache_dtype: Any) -> bool:
    """Whether a known name is one of fp8, of which layers have scales; those of packed latents are in the rows."""
    dtype = cache_dtype(kv_cache_dtype, latents=True)
    return dtype is not None and dtype.name in FP8


def stored_dtype(kv_cache_dtype: Any, dtype: Any, *, latents: bool = False) -> Any:
    """The dtype of a pool beside queries of `dtype`, which is also what "auto" stores.

    Args:
        latents: As in `cache_dtype`.

    Raises:
        ValueError: The name is unknown, or is neither fp8 nor that of `dtype`: kernels read no such mixture.
    """
    computed = named_dtype("dtype", dtype)
    stored = cache_dtype(kv_cache_dtype, latents=latents) or computed
    if stored != computed and not is_packed(stored) and stored.name not in FP8:
        raise ValueError(
            "`kv_cache_dtype` must be auto, one of fp8, or the dtype that the model computes in, "
            f"{computed.name}. Got {kv_cache_dtype!r}."
        )
    return stored
