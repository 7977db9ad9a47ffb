"""Absorbed MLA of a few queries a sequence (DeepSeek-V2, arXiv:2405.04434): a latent row is key and value of all heads.

Up to 16 rows of queries a sequence, decode's kernel reads a row once and takes its first columns as the value: queries
are the few columns of its products. More rows are rows of the products of a kernel of their own.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionCall, AttentionOptions
from jattn_kernels.lowering.key_bounds import KeyBounds, depends_on_places, seen_by_some
from jattn_kernels.lowering.mask_words import mask_words_by_key
from jattn_kernels.lowering.split_schedule import DecodeSchedule, split
from jattn_kernels.lowering.token_bounds import sequence_bounds
from jattn_kernels.mosaic.sm90.common.tiles import num_sms
from jattn_kernels.mosaic.sm90.decode import split_kv
from jattn_kernels.mosaic.sm90.mla.config import BLOCK_KV, BLOCK_ROWS, PAIR
from jattn_kernels.mosaic.sm90.mla.rows import attend_rows
from jattn_kernels.operands import AttentionOperands

_FEW_ROWS = 16  # as many as decode's kernel has memory for
_LEAST_PAIRS = 2  # of a worker, while half of them are at work: a pair alone takes as long, and merging it longer
_PAIRS_PER_SPLIT = 8  # where results must not depend on the batch


def make_schedule(
    call: AttentionCall, seq_lens: Int[Array, " B"], cu_q_lens: None, max_seq_len: int | None
) -> DecodeSchedule | None:
    """The work list; None if it needs a `max_seq_len` that is not given."""
    assert call.num_tokens is not None
    if _has_few_rows(call, call.num_tokens):
        return split_kv.make_schedule(call, seq_lens, max_seq_len)
    if call.spec.batch_invariant and max_seq_len is None:
        return None
    bounds = sequence_bounds(seq_lens, AttentionOptions(), call.spec, call.num_tokens)
    return _schedule(call, bounds, call.num_tokens, max_seq_len)


def mla_decode(
    call: AttentionCall, operands: AttentionOperands
) -> tuple[Float[Array, "B Q N C"], Float[Array, "B Q N"]]:
    """Output and lse of a few queries a sequence."""
    assert operands.q_pe is not None
    pages = jnp.expand_dims(operands.k, -2)  # of one head
    if _has_few_rows(call, operands.q.shape[1]):
        return split_kv.paged_decode(call, dataclasses.replace(operands, k=pages))
    return _many_rows(call, dataclasses.replace(operands, k=pages))


def _has_few_rows(call: AttentionCall, num_tokens: int) -> bool:
    # A token's results must not depend on how many are asked at a time: one kernel for all numbers of them.
    rows = call.spec.num_q_heads * (1 if call.spec.batch_invariant else num_tokens)
    return rows <= _FEW_ROWS or "alibi_slopes" in call.features


def _many_rows(
    call: AttentionCall, operands: AttentionOperands
) -> tuple[Float[Array, "B Q N C"], Float[Array, "B Q N"]]:
    spec, options, seq_lens = call.spec, operands.options, operands.seq_lens
    assert call.page_size is not None
    num_tokens, max_keys = operands.q.shape[1], operands.page_table.shape[1] * call.page_size
    bounds = sequence_bounds(seq_lens, options, spec, num_tokens)
    schedule = options.schedule
    if schedule is None or depends_on_places(spec, options):
        schedule = _schedule(call, bounds, num_tokens, max_keys)
    mask = None
    if options.custom_mask is not None:
        num_keys = max(max_keys + -max_keys % BLOCK_KV, BLOCK_KV)
        mask = mask_words_by_key(options.custom_mask, seq_lens, num_tokens=num_tokens, num_keys=num_keys)
    return attend_rows(call, operands, bounds, schedule, mask=mask)


def _schedule(call: AttentionCall, bounds: KeyBounds, num_tokens: int, max_keys: int | None) -> DecodeSchedule:
    """Parts of sequences for as many workers as, with all blocks of rows, fill the GPU once."""
    spec = call.spec
    row_blocks = -(-num_tokens * spec.num_q_heads // BLOCK_ROWS)
    pairs_per_split = _PAIRS_PER_SPLIT if spec.batch_invariant else None
    workers = max(1, num_sms() // row_blocks)
    shares = {"workers": workers, "at_once": max(1, workers // 2), "least_share": _LEAST_PAIRS}
    return split(*seen_by_some(bounds), pairs_per_split, max_keys, block_kv=PAIR, **shares)
