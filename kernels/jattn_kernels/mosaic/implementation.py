"""Which calls the Mosaic GPU kernels serve, and on which GPUs."""

from collections.abc import Callable
from typing import Any

from jattn_kernels.call import AttentionCall, Implementation, Operation
from jattn_kernels.mosaic.sm90 import extend, many_rows
from jattn_kernels.mosaic.sm90.mask_words import MOST_TOKENS
from jattn_kernels.mosaic.sm90.rotate_and_write import heads_at_once, rotate_and_write

_HOPPER = (9, 0)
_DTYPES = ("bfloat16", "float16")
_FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
_FP8_OPERATIONS: tuple[Operation, ...] = ("paged_decode", "paged_extend", "ragged_extend")
_HEAD_DIMS: dict[Operation, tuple[int, ...]] = {
    **dict.fromkeys(("paged_decode", "paged_extend", "ragged_extend"), (64, 80, 96, 128, 192, 256)),
    "rotate_and_write": (64, 128, 256),
}
_TURNED_HEAD_DIMS: dict[Operation, tuple[int, ...]] = {
    "paged_decode": (128, 256),
    **dict.fromkeys(("paged_extend", "ragged_extend"), (64, 128, 192, 256)),
}
_PAGE_SIZES: dict[Operation, tuple[int, ...]] = {
    "paged_decode": (8, 16, 32, 64, 128, 256),
    "paged_extend": (8, 16, 32, 64, 128, 256),
    "rotate_and_write": (8, 16, 32, 64, 128),
}
# Optional arguments, and fields of a spec.
_NOT_SERVED: dict[Operation, tuple[str, ...]] = {
    "paged_decode": (),
    "paged_extend": (),
    "ragged_extend": (),
    "rotate_and_write": ("k_scale", "v_scale", "partial_rotary", "combined_pool"),
}


def refuses(call: AttentionCall) -> str | None:
    """Why `mosaic` cannot serve a call, or None."""
    spec, device, operation = call.spec, call.device, call.operation
    if device.compute_capability != _HOPPER:
        found = (
            device.platform
            if device.compute_capability is None
            else "compute capability {}.{}".format(*device.compute_capability)
        )
        return f"`mosaic` has kernels for compute capability 9.0 (Hopper) only; this is {found}."
    if operation not in OPERATIONS:
        return f"`mosaic` does not do {operation}."
    fp8 = operation in _FP8_OPERATIONS and call.kv_dtype in _FP8_DTYPES
    q_dtypes = (*_DTYPES, *_FP8_DTYPES) if fp8 else (call.kv_dtype,)
    if call.q_dtype not in q_dtypes or not (fp8 or call.kv_dtype in _DTYPES):
        return f"`mosaic` does not take {call.q_dtype} queries and {call.kv_dtype} keys in {operation}."
    if fp8 and (spec.head_dim % 64 or spec.value_dim % 64):
        return f"`mosaic` takes fp8 keys of head_dim 64, 128, 192 or 256, not {spec.head_dim} and {spec.value_dim}."
    head_dims = _HEAD_DIMS[operation]
    alike = operation == "rotate_and_write"
    if {spec.head_dim, spec.value_dim} - set(head_dims) or (alike and spec.value_dim != spec.head_dim):
        return (
            f"`mosaic` takes head_dim {', '.join(map(str, head_dims))} in {operation}, keys and values "
            f"{'alike' if alike else 'each'}, not {spec.head_dim} and {spec.value_dim}."
        )
    page_sizes = _PAGE_SIZES.get(operation)
    if page_sizes is not None and call.page_size not in page_sizes:
        return f"`mosaic` takes page_size {', '.join(map(str, page_sizes))} in {operation}, not {call.page_size}."
    for name in _NOT_SERVED[operation]:
        if name in call.features or getattr(spec, name, None):
            return f"`mosaic` does not do `{name}` in {operation}."
    turned = _TURNED_HEAD_DIMS.get(operation)
    if turned is not None and spec.rope_theta is not None and spec.head_dim not in turned:
        return f"`mosaic` turns keys of head_dim {', '.join(map(str, turned))} in {operation}, not {spec.head_dim}."
    if operation == "paged_decode" and "custom_mask" in call.features and (call.num_tokens or 1) > MOST_TOKENS:
        return (
            f"`mosaic` takes masks of at most {MOST_TOKENS} query tokens a sequence in {operation}, "
            f"not {call.num_tokens}."
        )
    if operation == "rotate_and_write" and heads_at_once(spec) is None:
        return (
            "`mosaic` turns heads of which a common divisor of query and key heads has a multiple of 256 numbers, "
            f"not {spec.num_q_heads} and {spec.num_kv_heads} of {spec.head_dim}."
        )
    return None


OPERATIONS: dict[Operation, Callable[..., Any]] = {
    "paged_decode": many_rows.paged_decode,
    "paged_extend": extend.paged_extend,
    "ragged_extend": extend.ragged_extend,
    "rotate_and_write": rotate_and_write,
}
MOSAIC = Implementation(
    name="mosaic",
    refuses=refuses,
    operations=OPERATIONS,
    schedules={"paged_decode": many_rows.decode_schedule, "paged_extend": extend.make_schedule},
)
