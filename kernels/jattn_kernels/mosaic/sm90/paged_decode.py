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

from jattn_kernels.call import AttentionOptions
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS, num_sms
from jattn_kernels.mosaic.sm90.decode import split_kv as paged
from jattn_kernels.mosaic.sm90.decode.schedule import DecodeSchedule
from jattn_kernels.mosaic.sm90.extend import entry as extend
from jattn_kernels.mosaic.sm90.extend.schedule import ExtendSchedule, heads_per_tile, tokens_per_query_block
from jattn_kernels.spec import AttentionSpec

_MANY_ROWS = 48  # from here on decode's kernel falls behind by more than uneven lengths may cost
_LEAST_BUSY = 0.9  # of the SMs, if all sequences are of one length: what idles must not cost more than is won


def is_for_extend(spec: AttentionSpec, *, batch_size: int, num_tokens: int, kv_itemsize: int) -> bool:
    """Whether extend's kernel does a decode call.

    It must have what the call asks for, read the keys no more often than decode's, and keep the SMs busy with work
    tiles that are not cut. Results that must not depend on the batch come from one kernel whatever the batch is.

    Args:
        num_tokens: Query tokens a sequence.
        kv_itemsize: Bytes of a number of a key or value.
    """
    if spec.batch_invariant or spec.rope_theta is not None or kv_itemsize == 1:
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


def decode_schedule(
    seq_lens: Int[Array, " B"],
    cu_q_lens: None = None,
    *,
    spec: AttentionSpec,
    num_tokens: int,
    kv_itemsize: int,
    max_seq_len: int | None = None,
) -> DecodeSchedule | ExtendSchedule | None:
    """The work list of the kernel that does such calls; None if it needs a `max_seq_len` that is not given.

    Args:
        num_tokens: Query tokens a sequence.
    """
    batch_size = seq_lens.shape[0]
    facts = {"spec": spec, "kv_itemsize": kv_itemsize}
    if is_for_extend(batch_size=batch_size, num_tokens=num_tokens, **facts):
        offsets = _cu_q_lens(batch_size, num_tokens)
        return extend.make_schedule(seq_lens, offsets, num_tokens=batch_size * num_tokens, **facts)
    return paged.decode_schedule(seq_lens, num_tokens=num_tokens, max_seq_len=max_seq_len, **facts)


def paged_decode(
    q: Float[Array, "B Q N H"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    options: AttentionOptions,
    *,
    spec: AttentionSpec,
    page_size: int,
) -> tuple[Float[Array, "B Q N Hv"], Float[Array, "B Q N"]]:
    """Output and lse of a few queries a sequence."""
    batch_size, num_tokens = q.shape[:2]
    keys = (k_pages, v_pages, page_table, seq_lens)
    kv_itemsize = k_pages.dtype.itemsize
    by_extend = is_for_extend(spec, batch_size=batch_size, num_tokens=num_tokens, kv_itemsize=kv_itemsize)
    if not by_extend:
        return paged.paged_decode(q, *keys, options, spec=spec, page_size=page_size)
    if options.q_positions is not None:
        options = dataclasses.replace(options, q_positions=options.q_positions.reshape(-1))
    by_token, cu_q_lens = q.reshape(-1, *q.shape[2:]), _cu_q_lens(batch_size, num_tokens)
    out, lse = extend.paged_extend(by_token, *keys, cu_q_lens, options, spec=spec, page_size=page_size)
    return out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])


def _cu_q_lens(batch_size: int, num_tokens: int) -> Int[Array, " B_plus_1"]:
    return jnp.arange(batch_size + 1, dtype=jnp.int32) * num_tokens
