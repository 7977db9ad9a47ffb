"""Log-probabilities of tokens under the model's own logits, beside those of the likeliest tokens."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jattn.pytree import pytree


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


def token_logprobs(
    logits: Float[Array, "N V"], tokens: Int[Array, " N"], wanted: Bool[Array, " N"], *, top: int
) -> TokenLogprobs:
    """Log-probabilities of `tokens`, and of the `top` likeliest; zeros if none is `wanted`."""
    return lax.cond(
        jnp.any(wanted),
        lambda: _token_logprobs(logits, tokens, top),
        lambda: _nothing(logits.shape[0], top),
    )


def prompt_logprobs(
    compute_logits: Callable[[Float[Array, "C D"]], Float[Array, "C V"]],
    hidden: Float[Array, "T D"],
    next_ids: Int[Array, " T"],
    wanted: Bool[Array, " T"],
    *,
    top: int,
    rows_at_once: int = 256,
) -> TokenLogprobs:
    """Log-probabilities of the token after each place of a prefill.

    Args:
        next_ids: The tokens after.
        wanted: Places whose answer is asked for; the others' means nothing.
        rows_at_once: Places whose logits are held at the same time.
    """
    num_tokens = hidden.shape[0]
    size = min(rows_at_once, num_tokens)
    parts = -(-num_tokens // size)

    def split(array):
        padding = [(0, parts * size - num_tokens)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(parts, size, *array.shape[1:])

    def of_part(part):
        hidden, next_ids, wanted = part
        return lax.cond(
            jnp.any(wanted),
            lambda: _token_logprobs(compute_logits(hidden), next_ids, top),
            lambda: _nothing(size, top),
        )

    of_parts = lax.map(of_part, (split(hidden), split(next_ids), split(wanted)))
    return jax.tree.map(lambda leaf: leaf.reshape(parts * size, *leaf.shape[2:])[:num_tokens], of_parts)


def _token_logprobs(logits, tokens, top):
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    logprob = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)
    lower = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] < tokens[:, None]
    before = (logprobs > logprob) | ((logprobs == logprob) & lower)
    top_logprobs, top_ids = lax.top_k(logprobs, top)
    return TokenLogprobs(
        logprob=logprob[:, 0],
        rank=1 + jnp.sum(before, axis=1, dtype=jnp.int32),
        top_ids=top_ids.astype(jnp.int32),
        top_logprobs=top_logprobs,
    )


def _nothing(size, top):
    return TokenLogprobs(
        logprob=jnp.zeros(size, jnp.float32),
        rank=jnp.zeros(size, jnp.int32),
        top_ids=jnp.zeros((size, top), jnp.int32),
        top_logprobs=jnp.zeros((size, top), jnp.float32),
    )
