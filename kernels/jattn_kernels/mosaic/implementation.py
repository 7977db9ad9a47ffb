"""Which calls the Mosaic GPU kernels serve, and on which GPUs."""

from collections.abc import Callable
from typing import Any

from jattn_kernels.call import AttentionCall, Implementation, Operation
from jattn_kernels.mosaic.sm90 import extend, paged
from jattn_kernels.mosaic.sm90.rotate_and_write import heads_at_once, rotate_and_write

_HOPPER = (9, 0)
_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = (64, 128, 256)
_PAGE_SIZES = (8, 16, 32, 64, 128)
_NOT_SERVED_OPTIONS = (
    "q_positions",
    "custom_mask",
    "q_scale",
    "k_scale",
    "v_scale",
    "alibi_slopes",
    "sinks",
    "partial_rotary",
)
_NOT_SERVED_FIELDS = ("logits_soft_cap", "window_left", "window_right", "chunk_size", "rope_theta", "combined_pool")


def refuses(call: AttentionCall) -> str | None:
    """Why `mosaic` cannot serve a call, or None."""
    spec, device = call.spec, call.device
    if device.compute_capability != _HOPPER:
        found = (
            device.platform
            if device.compute_capability is None
            else "compute capability {}.{}".format(*device.compute_capability)
        )
        return f"`mosaic` has kernels for compute capability 9.0 (Hopper) only; this is {found}."
    if call.operation not in OPERATIONS:
        return f"`mosaic` does not do {call.operation}."
    if call.q_dtype not in _DTYPES or call.kv_dtype != call.q_dtype:
        return f"`mosaic` takes {' or '.join(_DTYPES)}, queries and keys alike, not {call.q_dtype} and {call.kv_dtype}."
    if spec.head_dim not in _HEAD_DIMS or spec.value_dim != spec.head_dim:
        return (
            f"`mosaic` takes head_dim {', '.join(map(str, _HEAD_DIMS))}, keys and values alike, "
            f"not {spec.head_dim} and {spec.value_dim}."
        )
    if call.page_size not in _PAGE_SIZES:
        return f"`mosaic` takes page_size {', '.join(map(str, _PAGE_SIZES))}, not {call.page_size}."
    for name in _NOT_SERVED_OPTIONS:
        if name in call.features:
            return f"`mosaic` does not do `{name}`."
    for name in _NOT_SERVED_FIELDS:
        if getattr(spec, name) is not None:
            return f"`mosaic` does not do `{name}`."
    if call.operation == "rotate_and_write" and heads_at_once(spec) is None:
        return (
            "`mosaic` turns heads of which a common divisor of query and key heads has a multiple of 256 numbers, "
            f"not {spec.num_q_heads} and {spec.num_kv_heads} of {spec.head_dim}."
        )
    if spec.batch_invariant:
        return "`mosaic` does not promise `batch_invariant`: how a sequence is split depends on the batch."
    return None


OPERATIONS: dict[Operation, Callable[..., Any]] = {
    "paged_decode": paged.paged_decode,
    "paged_extend": extend.paged_extend,
    "rotate_and_write": rotate_and_write,
}
MOSAIC = Implementation(
    name="mosaic",
    refuses=refuses,
    operations=OPERATIONS,
    schedules={"paged_decode": paged.decode_schedule, "paged_extend": extend.make_schedule},
)
