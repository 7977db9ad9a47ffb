"""A short text from the model in training, without a cache: for the model card."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from .bpe import END_OF_TEXT_ID


def sample_text(
    logits_of: Callable[[jax.Array], jax.Array],
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """The prompt and what follows it, up to `num_tokens` tokens together or the end of the text.

    Args:
        logits_of: Logits [S, V] of tokens [1, S].
        tokenizer: The model's.
        prompt: Where to begin.
        num_tokens: Of the whole text.
        temperature: Above 0.
        seed: Of the draws.
    """
    ids = tokenizer.encode(prompt).ids
    tokens = jnp.zeros((1, num_tokens), jnp.int32).at[0, : len(ids)].set(jnp.array(ids, jnp.int32))

    def extend(position, tokens):
        logits = logits_of(tokens)[position - 1] / temperature
        token = jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), logits)
        return tokens.at[0, position].set(token.astype(jnp.int32))

    out = jax.jit(lambda tokens: jax.lax.fori_loop(len(ids), num_tokens, extend, tokens))(tokens)[0].tolist()
    ends = [place for place, token in enumerate(out) if place and token == END_OF_TEXT_ID]
    return tokenizer.decode(out[: ends[0] if ends else num_tokens])
