"""The choice of a token at each place, from logits."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn.parallel import NO_TOKEN
from jattn.pytree import pytree
from jattn.serving.steps.logit_rules import TokenMasks, apply_masks, apply_rules
from jattn.serving.steps.loop_state import LoopState
from jattn.serving.steps.sampler import sample

# What the requests of a launch ask for, at most: the likeliest token, a drawn one, or whatever there is.
Variant = Literal["greedy", "plain", "full"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


@pytree(kw_only=True)
class Choice:
    """The token chosen at each of N places.

    Attributes:
        tokens: NO_TOKEN where it is broken.
        broken: Whether the logits are not finite, or no token may come.
        stopped: Whether the token is a stop token of its row.
    """

    tokens: Int[Array, " N"]
    broken: Bool[Array, " N"]
    stopped: Bool[Array, " N"]


def choose(logits: Float[Array, "N V"], values: LoopState, variant: Variant, masks: TokenMasks | None = None) -> Choice:
    """Chooses a token at each place as its row asks.

    Args:
        values: The row of each place; `seq_lens` is the position of the token to be chosen.
        masks: Of each place; None where all tokens may come.
    """
    ruled = logits
    if variant == "full":
        assert values.rules
        assert values.history
        ruled = apply_rules(logits, values.rules, values.history, values.stop_ids, values.seq_lens)
    if masks is not None:
        ruled = apply_masks(ruled, masks)
    tokens = sample(ruled, values.sampling, values.seq_lens, greedy_only=variant == "greedy")
    broken = not_finite(logits)
    if masks is not None:
        broken |= jnp.all(ruled == -jnp.inf, axis=1)
    chosen = jnp.where(broken, NO_TOKEN, tokens)
    return Choice(tokens=chosen, broken=broken, stopped=stops(tokens, values.stop_ids))


def stops(tokens: Int[Array, " N"], stop_ids: Int[Array, "N stops"]) -> Bool[Array, " N"]:
    """Whether a token is one of its row's: column by column, since a reduction over few is a kernel of its own."""
    stopped = jnp.zeros(tokens.shape, jnp.bool_)
    for column in range(stop_ids.shape[1]):
        stopped |= tokens == stop_ids[:, column]
    return stopped


def not_finite(logits: Float[Array, "B V"]) -> Bool[Array, " B"]:
    """Whether a row has no likeliest token: a logit is NaN or +inf, or all are -inf. Some -inf only mask tokens."""
    return ~jnp.all(logits < jnp.inf, axis=1) | jnp.all(logits == -jnp.inf, axis=1)  # XLA's maximum may lose a NaN
