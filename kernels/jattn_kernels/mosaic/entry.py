"""What dispatch runs: each operation's entry on Hopper, and its work lists."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Int

from jattn_kernels.call import AttentionCall, Call, MatmulCall
from jattn_kernels.implementation import Operands
from jattn_kernels.mosaic import kept_layouts, layout_search, repeated_operations, warp_loads
from jattn_kernels.mosaic.sm90 import (
    gated_matmul,
    mla_decode,
    mla_extend,
    mla_queries,
    mla_write,
    paged_decode,
    rms_norm,
    rotate_and_write,
    skinny_matmul,
)
from jattn_kernels.mosaic.sm90.decode.projected import projected_decode
from jattn_kernels.mosaic.sm90.experts import entry as experts
from jattn_kernels.mosaic.sm90.extend import entry as extend
from jattn_kernels.mosaic.sm90.fp8 import entry as fp8
from jattn_kernels.mosaic.sm90.int4 import entry as int4
from jattn_kernels.mosaic.sm90.mlp import entry as mlp
from jattn_kernels.operands import LatentRowOperands, MatmulOperands

kept_layouts.install()
layout_search.install()
repeated_operations.install()
warp_loads.install()


def _matmul(call: MatmulCall, operands: MatmulOperands) -> Any:
    if call.gate is not None and call.kernel_dtype != "int4":
        return gated_matmul.gated_matmul(call, operands)
    products = {"float8_e4m3fn": fp8.matmul, "int4": int4.matmul}
    return products.get(call.kernel_dtype, skinny_matmul.matmul)(call, operands)


def _mla_write(call: AttentionCall, operands: LatentRowOperands) -> Any:
    run = mla_write.mla_write if operands.queries is None else mla_queries.absorb_and_write
    return run(call, operands)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "paged_decode": paged_decode.paged_decode,
    "projected_decode": projected_decode,
    "paged_extend": extend.paged_extend,
    "ragged_extend": extend.ragged_extend,
    "mla_decode": mla_decode.mla_decode,
    "mla_extend": mla_extend.mla_extend,
    "mla_write": _mla_write,
    "rotate_and_write": rotate_and_write.rotate_and_write,
    "rms_norm": rms_norm.rms_norm,
    "mixture_of_experts": experts.mixture_of_experts,
    "matmul": _matmul,
    "mlp_of_sum": mlp.mlp_of_sum,
}
_SCHEDULES: dict[str, Callable[..., Any]] = {
    "paged_decode": paged_decode.make_schedule,
    "paged_extend": extend.make_schedule,
    "mla_decode": mla_decode.make_schedule,
    "mla_extend": mla_extend.make_schedule,
}


def run(call: Call, operands: Operands) -> Any:
    """Serves a call that is not refused."""
    return OPERATIONS[call.operation](call, operands)


def make_schedule(
    call: AttentionCall, seq_lens: Int[Array, " B"], cu_q_lens: Int[Array, " B_plus_1"] | None, max_seq_len: int | None
) -> Any:
    """The work list of decode or of extend over pages; None of other operations, or if it needs a `max_seq_len`."""
    make = _SCHEDULES.get(call.operation)
    return None if make is None else make(call, seq_lens, cu_q_lens, max_seq_len)
