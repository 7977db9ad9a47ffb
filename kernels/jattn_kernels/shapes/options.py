"""Checks of the optional arguments of attention."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn_kernels.operands import AttentionOptions
from jattn_kernels.shapes.arrays import FLOATS, check_are_arrays, check_int32
from jattn_kernels.spec import AttentionSpec


def check_options(
    options: AttentionOptions, *, num_seqs: int, q_shape: tuple[int, ...], num_layers: int | None, spec: AttentionSpec
) -> None:
    """Checks the optional arguments of a call whose pages have `num_layers`, None without that axis.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    for name, shape in (("q_start", (num_seqs,)), ("kv_start", (num_seqs,)), ("q_positions", q_shape)):
        if getattr(options, name) is not None:
            check_int32(name, getattr(options, name), shape)
    mask = options.custom_mask
    if mask is not None:
        check_are_arrays(custom_mask=mask)
        check_mask(mask)
    check_one_a_head("alibi_slopes", options.alibi_slopes, spec)
    check_one_a_head("sinks", options.sinks, spec, num_layers=num_layers)
    heads = spec.num_kv_heads
    check_scale("q_scale", options.q_scale, heads, rows=num_seqs, row="sequence")
    for name in ("k_scale", "v_scale"):
        check_scale(name, getattr(options, name), heads, rows=num_layers, row="layer")


def check_mask(mask) -> None:
    """Checks the shape and dtype of a mask.

    Raises:
        ValueError: One is wrong.
    """
    if mask.dtype != jnp.bool_ or mask.ndim != 1:
        raise ValueError(
            f"`custom_mask` must be bool [M]. Got custom_mask.dtype={mask.dtype}, custom_mask.shape={mask.shape}."
        )


def check_mask_covers(mask, *, num_tokens: int = 1, cu_q_lens=None, seq_lens=None, cu_kv_lens=None) -> None:
    """Checks that a mask, or None, has a value for each query and key; says nothing of lengths that are traced.

    Args:
        num_tokens, cu_q_lens: Query tokens a sequence, or offsets of ragged ones.
        seq_lens, cu_kv_lens: Keys a sequence, or offsets of ragged ones.

    Raises:
        ValueError: It is too short: what it lacks would be read as hidden.
    """
    if mask is None or any(isinstance(lens, Tracer) for lens in (cu_q_lens, seq_lens, cu_kv_lens)):
        return
    q_lens = num_tokens if cu_q_lens is None else np.diff(cu_q_lens)
    kv_lens = np.asarray(seq_lens) if cu_kv_lens is None else np.diff(cu_kv_lens)
    least = int(np.sum(kv_lens.astype(np.int64) * q_lens))
    if mask.size < least:
        raise ValueError(
            f"`custom_mask` must be bool [M] with M at least {least}, a value for each query and key of each sequence. "
            f"Got custom_mask.shape={mask.shape}."
        )


def check_one_a_head(name: str, array, spec: AttentionSpec, *, num_layers: int | None = None) -> None:
    """Checks numbers, or None, for each query head.

    Args:
        num_layers: Of pages whose layers may each have their own; None if they may not.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    if array is None:
        return
    check_are_arrays(**{name: array})
    own, stacked = (spec.num_q_heads,), (num_layers, spec.num_q_heads)
    if array.shape not in (own, stacked) or array.dtype.name not in FLOATS:
        layers = "" if num_layers is None else f", or [layers={num_layers}, num_q_heads]"
        raise ValueError(
            f"`{name}` must be floats [num_q_heads={spec.num_q_heads}]{layers}. "
            f"Got {name}.dtype={array.dtype}, {name}.shape={array.shape}."
        )


def check_scale(name: str, scale, num_kv_heads: int, *, rows: int | None, row: str) -> None:
    """Checks a scale; the number of its axes alone says what it is for.

    Args:
        rows: Of a scale of two axes, each for one `row`; None if it may not have two.

    Raises:
        ValueError: Its shape or dtype is wrong.
    """
    if scale is None:
        return
    if not hasattr(scale, "dtype"):
        raise ValueError(f"`{name}` must be None or an array of floats. Got {name}={scale!r}.")
    forms = {(): "a scalar", (num_kv_heads,): f"[{num_kv_heads}] (one a KV head)"}
    if rows is not None:
        forms[rows, num_kv_heads] = f"[{rows}, {num_kv_heads}] (one row a {row})"
    if scale.dtype.name not in FLOATS or scale.shape not in forms:
        raise ValueError(
            f"`{name}` must be floats, {' or '.join(forms.values())}. "
            f"Got {name}.dtype={scale.dtype}, {name}.shape={scale.shape}."
        )


def check_features(features: Any) -> frozenset[str]:
    """Names of optional arguments, as a set.

    Raises:
        ValueError: One names no optional argument of attention, or they come as one text.
    """
    known = [field.name for field in dataclasses.fields(AttentionOptions) if field.name != "schedule"]
    if isinstance(features, str) or not set(features) <= set(known):
        raise ValueError(f"`features` must be names out of {', '.join(known)}. Got features={features!r}.")
    return frozenset(features)
