"""The sampler: one token a row from its logits, on the device, as each row's request asks."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jattn.pytree import pytree
from jattn_kernels import kept_tokens, over_temperature


@pytree(kw_only=True)
class SamplingState:
    """How each row's token is chosen.

    Attributes:
        temperature: 0 is greedy, whatever the other fields say.
        top_k: Keep the k likeliest tokens; 0 is off.
        top_p: Then keep the smallest set of the likeliest tokens that holds this share of what is left; 1 is off.
        min_p: Before both, drop the tokens less likely than this share of the likeliest one's probability; 0 is off.
        seed: Of the row's request; together with the token's position it fixes the row's randomness.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seed: UInt32[Array, " B"]


def sample(
    logits: Float[Array, "B V"], params: SamplingState, positions: Int[Array, " B"], *, greedy_only: bool
) -> Int[Array, " B"]:
    """Chooses a token for each row: temperature, then min-p, top-k and top-p, then a draw.

    The draw is keyed on fold_in(seed, position), so a row's token depends on no other row, nor on the row's place or
    the number of rows. Among equal logits the lower token id counts as the likelier one: top-k keeps exactly k
    tokens, and top-k of 1 is greedy. A NaN logit counts as -inf; a row of nothing else gives token 0.

    Args:
        params: A row that is padding may hold anything; zeros are cheapest.
        positions: Of the token to be chosen, in its sequence.
        greedy_only: Every row has temperature 0; the step is an argmax and reads neither `params` nor `positions`.
    """
    ordered = _without_nan(logits)
    greedy = jnp.argmax(ordered, axis=-1).astype(jnp.int32)
    if greedy_only:
        return greedy
    noise = jax.vmap(functools.partial(_gumbel, vocab_size=logits.shape[1]))(params.seed, positions)
    drawn = jnp.argmax(drawn_logits(logits, params) + noise, axis=-1).astype(jnp.int32)
    return jnp.where(params.temperature > 0, drawn, greedy)


def drawn_logits(logits: Float[Array, "B V"], params: SamplingState) -> Float[Array, "B V"]:
    """The logits that a token is drawn from: over temperature, and -inf for what min-p, top-k and top-p drop.

    Args:
        logits: NaN counts as -inf.
        params: A row of temperature 0 gives nothing of use.
    """
    kept = kept_tokens(
        logits,  # as they are, for the kernel to read: it knows NaN too
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )
    return jnp.where(kept, over_temperature(_without_nan(logits), params.temperature), -jnp.inf)


def _without_nan(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def _gumbel(seed: UInt32[Array, ""], position: Int[Array, ""], *, vocab_size: int) -> Float[Array, " V"]:
    """Noise whose argmax over `scaled + noise` draws from softmax(scaled)."""
    # Threefry by name: under vmap the other generators mix the rows.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    # "high": 23 random bits give ties among 100,000 tokens, and argmax would favour the lower ids.
    return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high")
