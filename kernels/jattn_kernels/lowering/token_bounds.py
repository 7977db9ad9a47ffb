"""What each token sees of its sequence's keys: of ragged sequences, or of as many tokens of each."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jattn_kernels.call import AttentionOptions
from jattn_kernels.lowering.key_bounds import KeyBounds, key_bounds
from jattn_kernels.spec import AttentionSpec


def token_bounds(
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    options: AttentionOptions,
    spec: AttentionSpec,
    num_tokens: int,
    leading_rows: Int[Array, " B"] | None = None,
) -> KeyBounds:
    """The bounds of each token's keys; padded tokens see none.

    Args:
        leading_rows: Keys that come before a sequence's own ones and are counted with them.
    """
    num_seqs = seq_lens.shape[0]
    q_start, kv_start = options.starts(seq_lens, jnp.diff(cu_q_lens))
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = owners(cu_q_lens, num_tokens)
    sequence = jnp.minimum(owner, num_seqs - 1)
    position = options.q_positions
    if position is None:
        position = q_start[sequence] + token - cu_q_lens[sequence]
    kv_len = jnp.where(owner < num_seqs, seq_lens[sequence], 0)
    bounds = key_bounds(position, kv_start[sequence], kv_len, spec, masked=options.custom_mask is not None)
    if leading_rows is None:
        return bounds
    before = leading_rows[sequence]
    return KeyBounds(jnp.minimum(bounds.first, kv_len) + before, bounds.end + before, bounds.position + before)


def sequence_bounds(
    seq_lens: Int[Array, " B"], options: AttentionOptions, spec: AttentionSpec, num_tokens: int
) -> KeyBounds:
    """The bounds of each token's keys, [B, tokens], where every sequence has as many tokens."""
    q_start, kv_start = options.starts(seq_lens, num_tokens)
    positions = options.q_positions
    if positions is None:
        positions = q_start[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    return key_bounds(positions, kv_start[:, None], seq_lens[:, None], spec, masked=options.custom_mask is not None)


def owners(cu_q_lens: Int[Array, " B_plus_1"], num_tokens: int) -> Int[Array, " T"]:
    """The sequence of each token; as many as there are for padded ones."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    return jnp.sum(cu_q_lens[1:, None] <= token[None], axis=0, dtype=jnp.int32)


def mask_rows(seq_lens: Int[Array, " B"], cu_q_lens: Int[Array, " B_plus_1"], num_tokens: int) -> Int[Array, " T"]:
    """Where each token's row of a custom mask begins; masks are [q_len, seq_len] row-major, one after the other."""
    sizes = seq_lens * jnp.diff(cu_q_lens)
    start = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    sequence = jnp.minimum(owners(cu_q_lens, num_tokens), seq_lens.shape[0] - 1)
    row = jnp.arange(num_tokens, dtype=jnp.int32) - cu_q_lens[sequence]
    return start[sequence] + row * seq_lens[sequence]
