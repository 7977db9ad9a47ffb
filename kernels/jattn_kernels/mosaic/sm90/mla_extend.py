"""Absorbed MLA of ragged queries: groups of a few tokens, each as a sequence of the latent kernel."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionCall, AttentionOptions
from jattn_kernels.lowering.key_bounds import KeyBounds, depends_on_places, seen_by_some
from jattn_kernels.lowering.split_schedule import DecodeSchedule, split_evenly, whole
from jattn_kernels.lowering.token_bounds import token_bounds
from jattn_kernels.mosaic.sm90.common.tiles import num_sms
from jattn_kernels.mosaic.sm90.mla.config import BLOCK_ROWS, PAIR
from jattn_kernels.mosaic.sm90.mla.groups import TokenGroups, group_size, token_groups
from jattn_kernels.mosaic.sm90.mla.rows import attend_rows
from jattn_kernels.operands import AttentionOperands


def make_schedule(
    call: AttentionCall, seq_lens: Int[Array, " B"], cu_q_lens: Int[Array, " B_plus_1"], max_seq_len: int | None
) -> DecodeSchedule:
    """The work list of queries at the ends of their sequences."""
    del max_seq_len
    assert call.num_tokens is not None
    groups = token_groups(cu_q_lens, call.num_tokens, group_size(call.spec.num_q_heads))
    return _schedule(call, _bounds(call, groups, seq_lens, cu_q_lens, AttentionOptions()))


def mla_extend(call: AttentionCall, operands: AttentionOperands) -> tuple[Float[Array, "T N C"], Float[Array, "T N"]]:
    """Output and lse of ragged queries over latent pages."""
    spec, options, cu_q_lens = call.spec, operands.options, operands.cu_q_lens
    groups = token_groups(cu_q_lens, operands.q.shape[0], group_size(spec.num_q_heads))
    bounds = _bounds(call, groups, operands.seq_lens, cu_q_lens, options)
    schedule = options.schedule
    if schedule is None or depends_on_places(spec, options):
        schedule = _schedule(call, bounds)
    grouped = dataclasses.replace(
        operands,
        q=groups.gathered(operands.q),
        q_pe=groups.gathered(operands.q_pe),
        k=jnp.expand_dims(operands.k, -2),  # of one head
    )
    out, lse = attend_rows(call, grouped, bounds, schedule, sequence=groups.sequence)
    return groups.scattered(out, 0.0), groups.scattered(lse, -jnp.inf)


def _bounds(
    call: AttentionCall,
    groups: TokenGroups,
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    options: AttentionOptions,
) -> KeyBounds:
    """Of the keys that each token of each group sees."""
    of_tokens = token_bounds(seq_lens, cu_q_lens, options, call.spec, groups.places.shape[0])
    return KeyBounds(*map(groups.gathered, of_tokens))


def _schedule(call: AttentionCall, bounds: KeyBounds) -> DecodeSchedule:
    """Parts of groups for as many workers as, with all blocks of rows, fill the GPU once.

    Where results must not depend on the batch each group is one part: then all its rows add in the order of the keys,
    and which other tokens a group has is of no account.
    """
    seen, size = seen_by_some(bounds), bounds.end.shape[1]
    row_blocks = -(-size * call.spec.num_q_heads // BLOCK_ROWS)
    workers = max(1, num_sms() // row_blocks)
    cut = whole if call.spec.batch_invariant else split_evenly
    return cut(*seen, block_kv=PAIR, workers=workers).with_places()
