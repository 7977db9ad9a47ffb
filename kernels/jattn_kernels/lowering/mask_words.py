"""Custom masks as the decode kernel reads them: for each key a word, in it a bit for each of a sequence's queries."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

MOST_TOKENS = 32  # bits of a word


def mask_words_by_key(
    custom_mask: Bool[Array, " M"], seq_lens: Int[Array, " B"], *, num_tokens: int, num_keys: int
) -> Int[Array, "B num_keys"]:
    """Words of masks that are [num_tokens, seq_len] row-major, one sequence after the other; 0 past the last key.

    Args:
        num_keys: Keys a sequence at most.
    """
    if custom_mask.shape[0] == 0:
        custom_mask = jnp.zeros(1, bool)  # nothing can be gathered from no entry
    sizes = seq_lens * num_tokens
    start = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    key = jnp.arange(num_keys, dtype=jnp.int32)
    entry = (start[:, None] + token[None] * seq_lens[:, None])[:, :, None] + key[None, None]
    seen = custom_mask.at[entry].get(mode="fill", fill_value=False) & (key[None] < seq_lens[:, None])[:, None]
    return jnp.sum(seen.astype(jnp.int32) << token[None, :, None], axis=1, dtype=jnp.int32)
