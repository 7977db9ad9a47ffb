"""What can be said of an EngineConfig before anything is known of the model."""

import dataclasses
import types
import typing
from typing import Any

import jax.numpy as jnp

from jattn.arguments import instance, whole_number
from jattn.backend import backend_class
from jattn.checkpoint import check_quantization, checked_rope_scaling
from jattn.kv_cache_dtype import cache_dtype, stored_dtype
from jattn.serving.steps.drafting import check_drafter, check_drafter_fits

DTYPES = ("auto", "float32", "bfloat16", "float16")


def checked(config: Any) -> dict[str, Any]:
    """The sizes as ints, of whatever integer type they were, and objects as JSON.

    Raises:
        ValueError: A value is out of its range.
    """
    kinds = {field.name: (*typing.get_args(field.type), field.type)[0] for field in dataclasses.fields(config)}
    sizes: dict[str, Any] = {}
    for name, kind in kinds.items():
        value = getattr(config, name)
        is_optional = isinstance(kind, types.UnionType)
        if kind in (int, int | None) and not (is_optional and value is None):
            least = 2 if name == "num_pages" else 1
            sizes[name] = whole_number(value, f"`{name}` must be a whole number of at least {least}.", least)
        elif kind in (bool, bool | None):
            instance(name, value, bool, *[type(None)] * is_optional)
    if not isinstance(config.dtype, str) or config.dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}. Got {config.dtype!r}.")
    check_quantization(config.quantization)
    if config.dtype == "auto":
        cache_dtype(config.kv_cache_dtype, latents=True)
    else:
        stored_dtype(config.kv_cache_dtype, jnp.dtype(config.dtype), latents=True)
    backend_class(config.backend)
    if config.batch_invariant:
        _check_invariant(config)
    check_drafter(config.speculative)
    if config.speculative and "max_context_len" in sizes:
        check_drafter_fits(config.speculative, sizes["max_context_len"])
    return sizes | {"rope_scaling": checked_rope_scaling(config.rope_scaling)}


def _check_invariant(config: Any) -> None:
    for name, most in (("backend", "paged"), ("speculative", None), ("mixed_steps", None), ("structured_steps", False)):
        value = getattr(config, name)
        if value not in (most, False):
            raise ValueError(f"`{name}` must be {most} where `batch_invariant` is True. Got {value!r}.")
