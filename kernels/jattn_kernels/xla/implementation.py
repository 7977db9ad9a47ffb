"""Which calls portable jnp serves: nearly all, on any device."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from jattn_kernels.call import AttentionCall, Call, ExpertsCall, MatmulCall, MlpCall, NormCall
from jattn_kernels.implementation import Implementation, Operands
from jattn_kernels.norm_formula import norm_of_rows
from jattn_kernels.operands import NormOperands
from jattn_kernels.packed_latents import is_packed
from jattn_kernels.xla import attention, experts
from jattn_kernels.xla.filters import kept_tokens
from jattn_kernels.xla.matmul import matmul
from jattn_kernels.xla.mla_write import mla_write
from jattn_kernels.xla.rotate_and_write import rotate_and_write

_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def refuses(call: Call) -> str | None:
    """Why `xla` cannot serve a call, or None."""
    if isinstance(call, NormCall) and call.rounded:
        return "`xla` rounds rows to fp8 before their product, by itself."
    if isinstance(call, NormCall) and call.of_sum:
        return "`xla` adds splits up before it norms the sum, by itself."
    if isinstance(call, MatmulCall) and call.norm is not None:
        return "`xla` takes the norm of rows before their product, by itself."
    if isinstance(call, MatmulCall) and call.activation is not None:
        return "`xla` takes the activation of rows before their product, by itself."
    if isinstance(call, MatmulCall) and call.gate is not None:
        return "`xla` takes no activation after a product."
    if isinstance(call, MatmulCall) and call.biased:
        return "`xla` adds a bias after a product, by itself."
    if isinstance(call, MlpCall):
        return "`xla` takes an MLP's products one by one."
    if isinstance(call, ExpertsCall) and call.router is not None:
        return "`xla` takes a router's logits before the mixture, by itself."
    if not isinstance(call, AttentionCall):
        return None
    if call.absorbed is not None:
        return "`xla` absorbs queries before the write of latent rows, by itself."
    if call.operation == "projected_decode":
        return "`xla` turns heads and writes keys before it decodes, by itself."
    packs = call.operation.startswith("mla") and is_packed(call.kv_dtype)
    for dtype in (call.q_dtype, *(() if packs else (call.kv_dtype,))):
        if dtype not in _DTYPES:
            return f"`xla` does not do {dtype}: it takes {', '.join(_DTYPES)}."
    if call.spec.batch_invariant:
        return "`xla` does not promise `batch_invariant`: XLA's matrix products may differ between batch shapes."
    return None


def _rms_norm(call: NormCall, operands: NormOperands) -> Float[Array, "T D"]:
    return norm_of_rows(operands.x, operands.scale, operands.layer_index, eps=call.eps, offset=call.offset)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "paged_decode": attention.paged_decode,
    "paged_extend": attention.paged_extend,
    "ragged_extend": attention.ragged_extend,
    "mla_decode": attention.mla_decode,
    "mla_extend": attention.mla_extend,
    "mla_write": mla_write,
    "rotate_and_write": rotate_and_write,
    "rms_norm": _rms_norm,
    "mixture_of_experts": experts.mixture_of_experts,
    "matmul": matmul,
    "kept_tokens": kept_tokens,
}


def run(call: Call, operands: Operands) -> Any:
    """Serves a call that is not refused."""
    return _OPERATIONS[call.operation](call, operands)


XLA = Implementation(name="xla", refuses=refuses, run=run)
