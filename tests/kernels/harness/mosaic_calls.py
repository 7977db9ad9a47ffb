"""Calls of Mosaic's own entries, which take what a face and dispatch would make of its arguments."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn_kernels import AttentionSpec
from jattn_kernels.call import AttentionCall, AttentionOptions, Operation
from jattn_kernels.operands import AttentionOperands

_PAGED = ("q", "k", "v", "page_table", "seq_lens")
_ARRAYS: dict[Operation, tuple[str, ...]] = {
    "paged_decode": _PAGED,
    "paged_extend": (*_PAGED, "cu_q_lens"),
    "ragged_extend": ("q", "k", "v", "cu_q_lens", "cu_kv_lens"),
}


def mosaic_call(
    operation: Operation,
    arrays: Any,
    options: AttentionOptions,
    spec: AttentionSpec,
    page_size: int | None = None,
) -> tuple[AttentionCall, AttentionOperands]:
    """The arguments of an operation's entry.

    Args:
        arrays: In the order of the operation's face.
    """
    operands = AttentionOperands(**dict(zip(_ARRAYS[operation], arrays, strict=True)), options=options)
    dtypes = {"q_dtype": operands.q.dtype.name, "kv_dtype": operands.k.dtype.name}
    return AttentionCall(operation=operation, spec=spec, page_size=page_size, **dtypes), operands


def run(entry: Callable[..., Any], *arguments: Any) -> Any:
    """What an entry gives for a call of `mosaic_call`'s arguments.

    Compiled as one, for by itself each operation around the kernel would be; and anew, as tests patch what it calls.
    """
    call, operands = mosaic_call(*arguments)
    return jax.jit(functools.partial(entry, call))(operands)


def schedule_call(operation: Operation, spec: AttentionSpec, num_tokens: int, dtype: Any) -> AttentionCall:
    """What work lists of calls over keys of some dtype are made of."""
    return AttentionCall(
        operation=operation,
        spec=spec,
        q_dtype=jnp.dtype(dtype).name,
        kv_dtype=jnp.dtype(dtype).name,
        page_size=16,
        num_tokens=num_tokens,
    )
