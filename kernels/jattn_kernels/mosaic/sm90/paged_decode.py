"""Paged decode by the kernel that suits the call: extend's where there are many query rows a head, else decode's.

Decode's kernel keeps up with the memory as long as its tiles have few columns of queries. Drafted tokens that are
verified make more: span of one call, bf16, 64 sequences of 8192 keys, 8 kv heads of 128, 4 query heads each:

    tokens a sequence    rows a kv head    decode's kernel    extend's kernel
                    1                 4             498 us             510 us
                    4                16             518 us             502 us
                    8                32             510 us             507 us
                   12                48             550 us             505 us
                   16                64             686 us             511 us

Extend's kernel has rows of queries where decode's has columns. It does not split a sequence's keys, as decode's does:
it needs enough sequences to fill the GPU, and one that is much longer than the others keeps them waiting. The choice
is made of shapes alone, since lengths are on the device, and so that a work list and the calls that take it agree.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionCall
from jattn_kernels.lowering.split_schedule import DecodeSchedule
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS, num_sms
from jattn_kernels.mosaic.sm90.decode import split_kv
from jattn_kernels.mosaic.sm90.extend import entry as extend
from jattn_kernels.mosaic.sm90.extend.schedule import ExtendSchedule, heads_per_tile, tokens_per_query_block
from jattn_kernels.operands import AttentionOperands

_MANY_ROWS = 48  # from here on decode's kernel falls behind by more than uneven lengths may cost
_LEAST_BUSY = 0.9  # of the SMs, if all sequences are of one length: what idles must not cost more than is won


def suits_extend(call: AttentionCall, batch_size: int, num_tokens: int) -> bool:
    """Whether extend's kernel does a decode call.

    It must have what the call asks for, read the keys no more often than decode's, and keep the SMs busy with work
    tiles that are not cut. Results that must not depend on the batch come from one kernel whatever the batch is.

    Args:
        num_tokens: Query tokens a sequence.
    """
    spec = call.spec
    if spec.batch_invariant or spec.rope_theta is not None or jnp.dtype(call.kv_dtype).itemsize == 1:
        return False
    rows, heads = num_tokens * spec.group_size, heads_per_tile(spec.group_size)
    work_tiles_per_head = spec.group_size // heads * -(-num_tokens // tokens_per_query_block(heads))
    work_tiles = batch_size * spec.num_kv_heads * work_tiles_per_head
    sms = num_sms()
    rounds = -(-work_tiles // sms)
    return (
        rows >= _MANY_ROWS
        and work_tiles_per_head <= -(-rows // WGMMA_ROWS)
        and work_tiles >= _LEAST_BUSY * sms * rounds
    )


def make_schedule(
    call: AttentionCall, seq_lens: Int[Array, " B"], cu_q_lens: None, max_seq_len: int | None
) -> DecodeSchedule | ExtendSchedule | None:
    """The work list of the kernel that does such calls; None if it needs a `max_seq_len` that is not given."""
    batch_size, num_tokens = seq_lens.shape[0], call.num_tokens
    assert num_tokens is not None
    if not suits_extend(call, batch_size, num_tokens):
        return split_kv.make_schedule(call, seq_lens, max_seq_len)
    by_token = dataclasses.replace(call, num_tokens=batch_size * num_tokens)
    return extend.make_schedule(by_token, seq_lens, _cu_q_lens(batch_size, num_tokens), max_seq_len)


def paged_decode(
    call: AttentionCall, operands: AttentionOperands
) -> tuple[Float[Array, "B Q N Hv"], Float[Array, "B Q N"]]:
    """Output and lse of a few queries a sequence."""
    q, positions = operands.q, operands.options.q_positions
    batch_size, num_tokens = q.shape[:2]
    if not suits_extend(call, batch_size, num_tokens):
        return split_kv.paged_decode(call, operands)
    if positions is not None:
        operands = operands.with_options(q_positions=positions.reshape(-1))
    by_token, cu_q_lens = q.reshape(-1, *q.shape[2:]), _cu_q_lens(batch_size, num_tokens)
    out, lse = extend.paged_extend(call, dataclasses.replace(operands, q=by_token, cu_q_lens=cu_q_lens))
    return out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])


def _cu_q_lens(batch_size: int, num_tokens: int) -> Int[Array, " B_plus_1"]:
    return jnp.arange(batch_size + 1, dtype=jnp.int32) * num_tokens
