"""Log-probabilities of tokens under the model's own logits, beside those of the likeliest tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jattn.pytree import pytree

_PART = 128  # tokens of the vocabulary, one by one in memory


@dataclasses.dataclass(frozen=True)
class Logprob:
    """A token's log-probability at some place.

    Attributes:
        logprob: Natural logarithm.
        rank: 1 for the likeliest token; among equal ones the lower id comes first.
        decoded_token: The token's text, where the caller works with text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@pytree(kw_only=True)
class TokenLogprobs:
    """Log-probabilities at N places: of the token there, and of the k likeliest ones in order."""

    logprob: Float[Array, " N"]
    rank: Int[Array, " N"]
    top_ids: Int[Array, "N k"]
    top_logprobs: Float[Array, "N k"]

    def at(self, place: int, token: int, count: int) -> dict[int, Logprob]:
        """Of the token at a place and of the `count` likeliest there, the token first; for NumPy arrays on the host."""
        found = {token: Logprob(float(self.logprob[place]), int(self.rank[place]))}
        likeliest = zip(self.top_ids[place, :count].tolist(), self.top_logprobs[place, :count].tolist(), strict=True)
        for rank, (token_id, logprob) in enumerate(likeliest, 1):
            found.setdefault(token_id, Logprob(logprob, rank))
        return found


def token_logprobs(logits: Float[Array, "N V"], tokens: Int[Array, " N"], *, top: int) -> TokenLogprobs:
    """Log-probabilities of `tokens`, and of the `top` likeliest."""
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=1)
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    lower = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] < tokens[:, None]
    before = (logits > own) | ((logits == own) & lower)
    top_logits, top_ids = _likeliest(logits, top)
    return TokenLogprobs(
        logprob=own[:, 0] - total,
        rank=1 + jnp.sum(before, axis=1, dtype=jnp.int32),
        top_ids=top_ids,
        top_logprobs=top_logits - total[:, None],
    )


def _likeliest(logits: Float[Array, "N V"], count: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """The greatest logits in order, among equal ones the lower id first, and their tokens.

    XLA sorts all that it is to find the greatest of. So those parts of the vocabulary are found first that have the
    greatest logits: of each token outside of them there are as many, one a part, that come before it.
    """
    num_parts = -(-logits.shape[1] // _PART)
    if not 0 < 2 * count < num_parts:
        greatest, tokens = lax.top_k(logits, count)
        return greatest, tokens
    padding = ((0, 0), (0, num_parts * _PART - logits.shape[1]))
    parts = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(-1, num_parts, _PART)
    chosen = jnp.sort(lax.top_k(jnp.max(parts, axis=2), count)[1], axis=1)  # by id again, for what is equal
    candidates = jnp.take_along_axis(parts, chosen[:, :, None], axis=1).reshape(-1, count * _PART)
    greatest, places = lax.top_k(candidates, count)
    return greatest, jnp.take_along_axis(chosen, places // _PART, axis=1) * _PART + places % _PART
