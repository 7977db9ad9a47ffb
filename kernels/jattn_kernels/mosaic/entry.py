"""What dispatch runs: the call's operands as the kernels' own entries take them."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jattn_kernels.call import AttentionCall, Call, NormCall
from jattn_kernels.mosaic.sm90 import paged_decode, rms_norm, rotate_and_write
from jattn_kernels.mosaic.sm90.extend import entry as extend
from jattn_kernels.operands import AttentionOperands, NormOperands, Operands, RotaryOperands


def run(call: Call, operands: Operands) -> Any:
    """Serves a call that is not refused."""
    return OPERATIONS[call.operation](call, operands)


def make_schedule(
    call: AttentionCall, seq_lens: Int[Array, " B"], cu_q_lens: Int[Array, " B_plus_1"] | None, max_seq_len: int | None
) -> Any:
    """The work list of decode or of extend over pages; None of other operations, or if it needs a `max_seq_len`."""
    make = {"paged_decode": paged_decode.decode_schedule, "paged_extend": extend.make_schedule}.get(call.operation)
    if make is None:
        return None
    facts: dict[str, Any] = {"num_tokens": call.num_tokens, "kv_itemsize": jnp.dtype(call.kv_dtype).itemsize}
    return make(seq_lens, cu_q_lens, spec=call.spec, max_seq_len=max_seq_len, **facts)


def _paged_decode(call: AttentionCall, operands: AttentionOperands) -> Any:
    return paged_decode.paged_decode(*_paged(operands), options=operands.options, **_facts(call))


def _paged_extend(call: AttentionCall, operands: AttentionOperands) -> Any:
    arrays: Any = *_paged(operands), operands.cu_q_lens
    return extend.paged_extend(*arrays, options=operands.options, **_facts(call))


def _ragged_extend(call: AttentionCall, operands: AttentionOperands) -> Any:
    arrays: Any = operands.q, operands.k, operands.v, operands.cu_q_lens, operands.cu_kv_lens
    return extend.ragged_extend(*arrays, options=operands.options, spec=call.spec)


def _rotate_and_write(call: AttentionCall, operands: RotaryOperands) -> Any:
    return rotate_and_write.rotate_and_write(*vars(operands).values(), spec=call.spec)


def _rms_norm(call: NormCall, operands: NormOperands) -> Any:
    return rms_norm.rms_norm(*vars(operands).values(), eps=call.eps, offset=call.offset)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "paged_decode": _paged_decode,
    "paged_extend": _paged_extend,
    "ragged_extend": _ragged_extend,
    "rotate_and_write": _rotate_and_write,
    "rms_norm": _rms_norm,
}


def _paged(operands: AttentionOperands) -> Any:
    return operands.q, operands.k, operands.v, operands.page_table, operands.seq_lens


def _facts(call: AttentionCall) -> dict[str, Any]:
    return {"spec": call.spec, "page_size": call.page_size}
