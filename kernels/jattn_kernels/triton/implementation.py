"""Which calls the Triton kernels serve, and on which GPUs.

jax-triton and Triton are imported when a call is theirs: nothing here needs them.
"""

import contextlib
import functools
import importlib.metadata
import re
from collections.abc import Mapping
from typing import Any

from jattn_kernels.call import (
    AttentionCall,
    Call,
    ExpertsCall,
    FiltersCall,
    MatmulCall,
    MlpCall,
    NormCall,
    default_device,
)
from jattn_kernels.implementation import Implementation, refuses_mode
from jattn_kernels.packed_latents import is_packed
from jattn_kernels.traced_once import run_once
from jattn_kernels.triton.gpus import SHARED_MEMORY
from jattn_kernels.triton.launch import is_interpreting

_DTYPES = ("float32", "bfloat16", "float16")
# jax-triton has `out_type` from here on.
_OLDEST = {"triton": (3, 6), "jax-triton": (0, 4, 1)}
_FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
_MOST_HEAD_DIM = 256
_MOST_LATENT = 512
_MOST_PACKED = 2048  # numbers of a latent row that is written: a program holds them in registers
_MOST_ROTATED = 1024  # numbers of a head that is rotated and written
_MOST_COLUMNS = 32768  # of a norm: a program holds a row in registers
_ATTENTION = ("paged_decode", "paged_extend", "ragged_extend", "mla_decode", "mla_extend")


def refuses(call: Call) -> str | None:
    """Why `triton` cannot serve a call, or None."""
    if not is_interpreting() and (sentence := _refuses_device(call)):
        return sentence
    if sentence := refuses_mode("triton", call):
        return sentence
    match call:
        case NormCall():
            return _refuses_norm(call)
        case ExpertsCall():
            return _refuses_experts(call)
        case MatmulCall() | MlpCall():
            return f"`triton` does not do {call.operation}."
        case FiltersCall():
            return None if call.num_rows else "`triton` takes some rows of logits, not none."
    if call.operation == "rotate_and_write":
        return _refuses_rotation(call)
    if call.operation == "mla_write" and call.absorbed is not None:
        return "`triton` absorbs no queries beside the write of latent rows."
    if call.operation == "mla_write":
        return _refuses_latent_write(call)
    return _refuses_attention(call)


def _refuses_experts(call: ExpertsCall) -> str | None:
    if call.router is not None:
        return "`triton` takes a router's logits before the mixture, by itself."
    if call.dtype not in _DTYPES or call.kernel_dtype != call.dtype:
        return f"`triton` does not take {call.dtype} tokens and {call.kernel_dtype} experts."
    return None


def _refuses_device(call: Call) -> str | None:
    device = call.device
    if device.compute_capability not in SHARED_MEMORY:
        served = ", ".join(f"{major}.{minor}" for major, minor in SHARED_MEMORY)
        return f"`triton` has kernels for compute capability {served}; this is {device.words}."
    # What another machine would do is not asked of this one's packages.
    return missing() if default_device().platform == "gpu" else None


@functools.cache
def missing() -> str | None:
    """What has to be installed before Triton's kernels can run, in a sentence; None if nothing."""
    found: dict[str, str] = {}
    for package in _OLDEST:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return unmet(found)


def unmet(versions: Mapping[str, str]) -> str | None:
    """`missing`, of a machine that has these versions of packages."""
    for package, oldest in _OLDEST.items():
        needed = ".".join(map(str, oldest))
        found = versions.get(package)
        if found is not None and tuple(map(int, re.findall(r"\d+", found)[: len(oldest)])) >= oldest:
            continue
        what = f"{package} {needed} or newer, not {found}" if found else f"{package}, which is not installed"
        return f"`triton` needs {what}: install `jax-triton>=0.4.1`, as the extras `cuda12` and `cuda13` do."
    return None


def _refuses_attention(call: AttentionCall) -> str | None:
    spec, operation = call.spec, call.operation
    if operation not in _ATTENTION:
        return f"`triton` does not do {operation}."
    fp8 = call.kv_dtype in _FP8_DTYPES
    if call.q_dtype not in (*_DTYPES, *_FP8_DTYPES) or not (fp8 or call.q_dtype == call.kv_dtype):
        return f"`triton` does not take {call.q_dtype} queries and {call.kv_dtype} keys."
    if operation.startswith("mla"):
        if spec.value_dim > _MOST_LATENT or spec.head_dim - spec.value_dim > _MOST_HEAD_DIM:
            return f"`triton` takes latents of at most {_MOST_LATENT} numbers, not {spec.value_dim}."
        return None
    for width in (spec.head_dim, spec.value_dim):
        if width % 8 or width > _MOST_HEAD_DIM:
            return f"`triton` takes head_dim 8, 16, ... {_MOST_HEAD_DIM}, not {width}."
    return None


def _refuses_norm(call: NormCall) -> str | None:
    if call.of_sum or call.rounded:
        return "`triton` does not add splits to what it norms, nor round it to fp8."
    if {call.dtype, call.scale_dtype} - {*_DTYPES}:
        return f"`triton` does not take rows of {call.dtype} with a scale in {call.scale_dtype}."
    if call.num_rows == 0 or not 1 <= call.columns <= _MOST_COLUMNS:
        return f"`triton` takes some rows of 1 to {_MOST_COLUMNS:,} numbers, not {call.num_rows} of {call.columns}."
    return None


def _refuses_latent_write(call: AttentionCall) -> str | None:
    if not is_packed(call.kv_dtype):
        return f"`triton` writes packed latents alone, not those of {call.kv_dtype}."
    compressed, rotated = call.spec.value_dim, call.spec.head_dim - call.spec.value_dim
    if call.q_dtype not in _DTYPES or call.num_tokens == 0 or compressed > _MOST_PACKED or compressed % 4:
        return (
            f"`triton` writes some rows of a multiple of 4 numbers up to {_MOST_PACKED:,} and of rotated ones, not "
            f"{call.num_tokens} of {compressed} and {rotated} in {call.q_dtype}."
        )
    return None


def _refuses_rotation(call: AttentionCall) -> str | None:
    if call.q_dtype not in _DTYPES:
        return f"`triton` does not take {call.q_dtype} heads in {call.operation}."
    if call.num_tokens == 0 or call.spec.head_dim > _MOST_ROTATED:
        return (
            f"`triton` takes some tokens of head_dim 1 to {_MOST_ROTATED} in {call.operation}, "
            f"not {call.num_tokens} of {call.spec.head_dim}."
        )
    for name in ("k_scale", "v_scale", "combined_pool"):
        if name in call.features or getattr(call.spec, name, None):
            return f"`triton` does not do `{name}` in {call.operation}."
    return None


def _run(call: Call, operands: Any) -> Any:
    from jattn_kernels.triton.entry import run

    return run_once(run, call, operands)


def _make_schedule(call: AttentionCall, *lengths: Any) -> Any:
    from jattn_kernels.triton.entry import make_schedule

    return make_schedule(call, *lengths)


TRITON = Implementation(
    name="triton",
    refuses=refuses,
    run=_run,
    make_schedule=_make_schedule,
    per_sequence_work=frozenset({"paged_decode", "paged_extend", "mla_decode", "mla_extend"}),
)
