"""What dispatch runs: each operation's entry, and its work lists."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Int

from jattn_kernels.call import AttentionCall, Call
from jattn_kernels.implementation import Operands
from jattn_kernels.operands import AttentionOperands
from jattn_kernels.triton import mla_write, rms_norm, rotate_and_write
from jattn_kernels.triton.attention import entry as attention
from jattn_kernels.triton.experts import entry as experts
from jattn_kernels.triton.filters import entry as filters


def _attend(call: AttentionCall, operands: AttentionOperands) -> Any:
    """Attention, whose kernels take the sinks of one layer."""
    options = dataclasses.replace(operands.options, sinks=operands.options.sinks_of_layer)
    return attention.run_attention(call, dataclasses.replace(operands, options=options))


OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("paged_decode", "paged_extend", "ragged_extend", "mla_decode", "mla_extend"), _attend),
    "mla_write": mla_write.mla_write,
    "rotate_and_write": rotate_and_write.rotate_and_write,
    "rms_norm": rms_norm.rms_norm,
    "mixture_of_experts": experts.mixture_of_experts,
    "kept_tokens": filters.kept_tokens,
}
_WITH_SCHEDULES = ("paged_decode", "paged_extend", "mla_decode", "mla_extend")


def run(call: Call, operands: Operands) -> Any:
    """Serves a call that is not refused."""
    return OPERATIONS[call.operation](call, operands)


def make_schedule(
    call: AttentionCall, seq_lens: Int[Array, " B"], cu_q_lens: Int[Array, " B_plus_1"] | None, max_seq_len: int | None
) -> Any:
    """The work list of attention over pages; None of other operations, or if it needs a `max_seq_len`."""
    if call.operation not in _WITH_SCHEDULES:
        return None
    return attention.make_schedule(call, seq_lens, cu_q_lens, max_seq_len)
