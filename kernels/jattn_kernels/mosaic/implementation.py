"""Which calls the Mosaic GPU kernels serve, and on which GPUs.

Pallas takes a second to import, and no step that is loaded from disk needs it: the kernels are imported when a call is
theirs.
"""

from typing import Any

import jax.numpy as jnp

from jattn_kernels.call import AttentionCall, Call, ExpertsCall, FiltersCall, MatmulCall, MlpCall, NormCall, Operation
from jattn_kernels.implementation import Implementation, refuses_mode
from jattn_kernels.lowering.mask_words import MOST_TOKENS
from jattn_kernels.packed_latents import is_packed
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.traced_once import run_once

_HOPPER = (9, 0)
_DTYPES = ("bfloat16", "float16")
_FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
_FP8_OPERATIONS: tuple[Operation, ...] = ("paged_decode", "paged_extend", "ragged_extend", "rotate_and_write")
_HEAD_DIMS: dict[Operation, tuple[int, ...]] = {
    **dict.fromkeys(("paged_decode", "paged_extend", "ragged_extend"), (64, 80, 96, 128, 192, 256)),
    "rotate_and_write": (64, 128, 256),
}
_ROTATED_HEAD_DIMS: dict[Operation, tuple[int, ...]] = {
    "paged_decode": (128, 256),
    **dict.fromkeys(("paged_extend", "ragged_extend"), (64, 128, 192, 256)),
}
_PAGE_SIZES: dict[Operation, tuple[int, ...]] = {
    "paged_decode": (8, 16, 32, 64, 128, 256),
    "paged_extend": (8, 16, 32, 64, 128, 256),
    **dict.fromkeys(("mla_decode", "mla_extend"), (16, 32, 64, 128)),
    "rotate_and_write": (8, 16, 32, 64, 128),
}
_MOST_LATENT, _ROTATED_DIM = 512, 64
_MOST_FP8_ROWS = 16
_MOST_ABSORBED, _ABSORBED_DIM = 64, 128  # tokens; numbers of a query head that do not turn
_PACKED_LATENT = 512  # numbers: rows of fewer are no multiples of the 16 bytes that a thread loads
# Optional arguments, and fields of a spec.
_NOT_SERVED: dict[Operation, tuple[str, ...]] = {
    "paged_decode": (),
    "paged_extend": (),
    "ragged_extend": (),
    "mla_extend": ("custom_mask", "alibi_slopes"),
    "rotate_and_write": ("k_scale", "v_scale", "partial_rotary", "combined_pool"),
}


def refuses(call: Call) -> str | None:
    """Why `mosaic` cannot serve a call, or None."""
    device = call.device
    if device.compute_capability != _HOPPER:
        return f"`mosaic` has kernels for compute capability 9.0 (Hopper) only; this is {device.words}."
    if sentence := refuses_mode("mosaic", call):
        return sentence
    match call:
        case NormCall():
            return _refuses_norm(call)
        case ExpertsCall():
            return _refuses_experts(call)
        case MatmulCall():
            return _refuses_matmul(call)
        case MlpCall():
            from jattn_kernels.mosaic.sm90.mlp import entry

            return entry.refuses(call)
        case FiltersCall():
            return "`mosaic` does not do kept_tokens."
    return _refuses_attention(call)


def _refuses_matmul(call: MatmulCall) -> str | None:
    if call.biased and call.kernel_dtype != call.dtype:
        return "`mosaic` adds no bias to products with weights in few bits."
    if call.gate is not None and call.kernel_dtype != "int4":
        from jattn_kernels.mosaic.sm90 import gated_matmul

        return gated_matmul.refuses(call)
    if call.kernel_dtype == "float8_e4m3fn":
        from jattn_kernels.mosaic.sm90.fp8 import entry as fp8

        return fp8.refuses(call)
    if call.activation is not None:
        return "`mosaic` takes the activation of rows that it rounds to fp8 alone."
    if call.kernel_dtype == "int4":
        from jattn_kernels.mosaic.sm90.int4 import entry as int4

        return int4.refuses(call)
    from jattn_kernels.mosaic.sm90.skinny_matmul import MOST_NORMED, MOST_ROWS, MOST_WEIGHTS, adds_up

    if call.dtype not in _DTYPES or call.kernel_dtype != call.dtype:
        return f"`mosaic` does not take {call.dtype} rows and {call.kernel_dtype} weights."
    is_small = call.depth * call.columns <= MOST_WEIGHTS and not (call.depth % 64 or call.columns % 32)
    if not 1 <= call.num_rows <= MOST_ROWS or not is_small:
        return (
            f"`mosaic` takes 1 to {MOST_ROWS} rows, and weights of a multiple of 64 inputs and one of 32 outputs, at "
            f"most {MOST_WEIGHTS:,} numbers, not {call.num_rows} rows and [{call.depth}, {call.columns}]."
        )
    if call.norm is not None and (call.depth > MOST_NORMED or call.norm.scale_dtype != call.dtype):
        return (
            f"`mosaic` norms rows of at most {MOST_NORMED:,} numbers with a scale of their dtype "
            f"before a product, not {call.depth} in {call.dtype} with a scale in {call.norm.scale_dtype}."
        )
    if call.norm is not None and call.norm.of_sum and not adds_up(call.norm):
        return (
            "`mosaic` adds up one row of a multiple of 64 numbers before a product, not "
            f"{call.norm.num_rows} of {call.norm.columns}."
        )
    return None


def _refuses_experts(call: ExpertsCall) -> str | None:
    if call.router is not None:
        from jattn_kernels.mosaic.sm90.experts import one_token_fits

        is_biased = call.router.choice_biased
        fits = call.kernel_dtype == call.dtype in _DTYPES and one_token_fits.fits(call, is_biased=is_biased)
        fits = fits or one_token_fits.fits_few_bits(call, is_biased=is_biased)
        return None if fits else "`mosaic` does not take the router's logits of this mixture by its own kernel."
    in_few_bits = call.scales is not None and call.dtype == "bfloat16"
    if call.dtype not in _DTYPES or not (in_few_bits or call.kernel_dtype == call.dtype):
        return f"`mosaic` does not take {call.dtype} tokens and {call.kernel_dtype} experts."
    if call.block is not None and (call.block[0] % 64 or call.block[1] % 128):
        return (
            "`mosaic` takes experts in fp8 with scales of blocks of a multiple of 64 outputs by one of 128 inputs, not "
            f"of {call.block[0]} by {call.block[1]}."
        )
    multiple = 128 if call.kernel_dtype == "float8_e4m3fn" else 64
    if call.num_tokens == 0 or call.hidden_size % multiple or call.units % multiple:
        return (
            f"`mosaic` takes some tokens of a multiple of {multiple} numbers, and experts of a multiple of {multiple} "
            f"hidden units, not {call.num_tokens} of {call.hidden_size}, and {call.units}."
        )
    return None


def _refuses_norm(call: NormCall) -> str | None:
    from jattn_kernels.mosaic.sm90 import rms_norm

    dtypes = jnp.dtype(call.dtype), jnp.dtype(call.scale_dtype)
    if call.num_rows == 0 or not rms_norm.supports(call.columns, *dtypes):
        return (
            "`mosaic` takes some rows of 1,024 to 8,192 numbers, a multiple of 64, of bfloat16 or float16, not "
            f"{call.num_rows} of {call.columns} in {call.dtype} with a scale in {call.scale_dtype}."
        )
    return None


def _refuses_attention(call: AttentionCall) -> str | None:
    spec, operation = call.spec, call.operation
    if operation in ("mla_decode", "mla_extend"):
        return _refuses_latent(call)
    if operation == "mla_write":
        return _refuses_latent_write(call)
    if operation == "projected_decode":
        from jattn_kernels.mosaic.sm90.decode import projected

        return projected.refuses(call)
    if operation not in _HEAD_DIMS:
        return f"`mosaic` does not do {operation}."
    fp8 = operation in _FP8_OPERATIONS and call.kv_dtype in _FP8_DTYPES
    alike = operation == "rotate_and_write"
    q_dtypes = (*_DTYPES, *(() if alike else _FP8_DTYPES)) if fp8 else (call.kv_dtype,)
    if call.q_dtype not in q_dtypes or not (fp8 or call.kv_dtype in _DTYPES):
        return f"`mosaic` does not take {call.q_dtype} queries and {call.kv_dtype} keys in {operation}."
    if fp8 and not alike and (spec.head_dim % 64 or spec.value_dim % 64):
        return f"`mosaic` takes fp8 keys of head_dim 64, 128, 192 or 256, not {spec.head_dim} and {spec.value_dim}."
    head_dims = _HEAD_DIMS[operation]
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
    rotated = _ROTATED_HEAD_DIMS.get(operation)
    if rotated is not None and spec.rope_theta is not None and spec.head_dim not in rotated:
        return f"`mosaic` rotates keys of head_dim {', '.join(map(str, rotated))} in {operation}, not {spec.head_dim}."
    if operation == "paged_decode" and "custom_mask" in call.features and (call.num_tokens or 1) > MOST_TOKENS:
        return (
            f"`mosaic` takes masks of at most {MOST_TOKENS} query tokens a sequence in {operation}, "
            f"not {call.num_tokens}."
        )
    return _refuses_rotation(call) if operation == "rotate_and_write" else None


def _refuses_latent(call: AttentionCall) -> str | None:
    spec, operation = call.spec, call.operation
    page_sizes = _PAGE_SIZES[operation]
    if (call.q_dtype, call.kv_dtype) == ("bfloat16", "float8_e4m3fn"):
        rows = spec.num_q_heads * (call.num_tokens or 1)
        if rows > _MOST_FP8_ROWS and "alibi_slopes" in call.features:
            return (
                f"`mosaic` does `alibi_slopes` of at most {_MOST_FP8_ROWS} rows of queries a sequence over fp8 "
                f"latents, not {rows}."
            )
    elif is_packed(call.kv_dtype):
        if sentence := _refuses_packed(call):
            return sentence
    elif call.q_dtype != call.kv_dtype or call.kv_dtype not in _DTYPES:
        return f"`mosaic` does not take {call.q_dtype} queries and {call.kv_dtype} latents in {operation}."
    if sentence := _refuses_latent_widths(spec):
        return sentence
    if call.page_size not in page_sizes:
        return f"`mosaic` takes page_size {', '.join(map(str, page_sizes))} in {operation}, not {call.page_size}."
    for name in _NOT_SERVED.get(operation, ()):
        if name in call.features:
            return f"`mosaic` does not do `{name}` in {operation}."
    if "custom_mask" in call.features and (call.num_tokens or 1) > MOST_TOKENS:
        return (
            f"`mosaic` takes masks of at most {MOST_TOKENS} query tokens a sequence in {operation}, "
            f"not {call.num_tokens}."
        )
    return None


def _refuses_packed(call: AttentionCall) -> str | None:
    if call.q_dtype != "bfloat16":
        return f"`mosaic` takes queries of bfloat16 over packed latents, not {call.q_dtype}."
    if call.spec.value_dim != _PACKED_LATENT:
        return f"`mosaic` takes packed latents of {_PACKED_LATENT} numbers, not {call.spec.value_dim}."
    return None


def _refuses_latent_write(call: AttentionCall) -> str | None:
    if call.q_dtype not in _DTYPES or call.kv_dtype != call.q_dtype:
        return f"`mosaic` does not take {call.q_dtype} rows and {call.kv_dtype} latents in mla_write."
    few = call.num_tokens is None or 1 <= call.num_tokens <= _MOST_ABSORBED
    if call.absorbed is not None and not (few and call.absorbed == _ABSORBED_DIM):
        return (
            f"`mosaic` absorbs queries of 1 to {_MOST_ABSORBED} tokens in mla_write, {_ABSORBED_DIM} numbers of a head,"
            f" not of {call.num_tokens}, {call.absorbed} of a head."
        )
    return _refuses_latent_widths(call.spec)


def _refuses_latent_widths(spec: AttentionSpec) -> str | None:
    if spec.value_dim % 128 or spec.value_dim > _MOST_LATENT or spec.head_dim - spec.value_dim != _ROTATED_DIM:
        return (
            f"`mosaic` takes latents of a multiple of 128 numbers up to {_MOST_LATENT}, and {_ROTATED_DIM} rotated "
            f"ones, not {spec.value_dim} and {spec.head_dim - spec.value_dim}."
        )
    return None


def _refuses_rotation(call: AttentionCall) -> str | None:
    from jattn_kernels.mosaic.sm90.rotate_and_write import heads_at_once

    spec = call.spec
    if heads_at_once(spec) is None:
        return (
            "`mosaic` rotates heads of which a common divisor of query and key heads has a multiple of 256 numbers, "
            f"not {spec.num_q_heads} and {spec.num_kv_heads} of {spec.head_dim}."
        )
    return None


def _run(call: Call, operands: Any) -> Any:
    from jattn_kernels.mosaic.entry import run

    return run_once(run, call, operands)


def _make_schedule(call: AttentionCall, *lengths: Any) -> Any:
    from jattn_kernels.mosaic.entry import make_schedule

    return make_schedule(call, *lengths)


MOSAIC = Implementation(
    name="mosaic",
    refuses=refuses,
    run=_run,
    make_schedule=_make_schedule,
    per_sequence_work=frozenset({"paged_decode", "paged_extend", "mla_decode", "mla_extend"}),
)
