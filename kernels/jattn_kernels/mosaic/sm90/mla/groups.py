"""Ragged tokens in groups that the latent kernel takes for sequences: a block of rows holds those of a few tokens."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jattn_kernels.lowering.token_bounds import owners
from jattn_kernels.mosaic.sm90.mla.config import BLOCK_ROWS


class TokenGroups(NamedTuple):
    """Tokens that follow each other in one sequence, so many a group.

    Attributes:
        sequence: Of each group; of a group without tokens the last one.
        tokens: Of each group; where it has fewer its last one again, and out of range where it has none.
        places: Of each token among those of all groups; out of range for a padded one.
    """

    sequence: Int[Array, " G"]
    tokens: Int[Array, "G size"]
    places: Int[Array, " T"]

    def gathered(self, of_tokens: Shaped[Array, "T ..."]) -> Shaped[Array, "G size ..."]:
        """What each token has, by groups; 0 where there is none."""
        return of_tokens.at[self.tokens].get(mode="fill", fill_value=0)

    def scattered(self, of_groups: Float[Array, "G size ..."], padding: float) -> Float[Array, "T ..."]:
        """The reverse, with something else for padded tokens."""
        of_all = of_groups.reshape(-1, *of_groups.shape[2:])
        return of_all.at[self.places].get(mode="fill", fill_value=padding)


def group_size(num_q_heads: int) -> int:
    """Tokens of a group: as many as a block of rows has room for."""
    return max(1, BLOCK_ROWS // num_q_heads)


def token_groups(cu_q_lens: Int[Array, " B_plus_1"], num_tokens: int, size: int) -> TokenGroups:
    """Each sequence's tokens cut from its first one on, and as many groups as any lengths may ask for."""
    num_seqs = cu_q_lens.shape[0] - 1
    most = (num_tokens + min(num_seqs, num_tokens) * (size - 1)) // size
    counts = -(-jnp.diff(cu_q_lens) // size)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])

    sequence = jnp.minimum(owners(starts, most), num_seqs - 1)
    group = jnp.arange(most, dtype=jnp.int32)
    first = cu_q_lens[sequence] + (group - starts[sequence]) * size
    token = jnp.minimum(first[:, None] + jnp.arange(size, dtype=jnp.int32)[None], cu_q_lens[sequence + 1][:, None] - 1)
    tokens = jnp.where((group < starts[-1])[:, None], token, num_tokens)

    owner = owners(cu_q_lens, num_tokens)
    of_token = jnp.minimum(owner, num_seqs - 1)
    number = jnp.arange(num_tokens, dtype=jnp.int32) - cu_q_lens[of_token]
    places = jnp.where(owner < num_seqs, starts[of_token] * size + number, most * size)
    return TokenGroups(sequence, tokens, places)
