"""What min-p, top-k and top-p leave of each row's tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn_kernels.call import FiltersCall, modes_of
from jattn_kernels.dispatch import choose
from jattn_kernels.operands import FiltersOperands
from jattn_kernels.shapes.filters import check_filters


def kept_tokens(
    logits: Float[Array, "B V"],
    *,
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    implementation: str | None = None,
) -> Bool[Array, "B V"]:
    """The tokens of each row that may be drawn, which depend on no other row: of those above -inf one at least.

    Among equal logits the lower token id counts as the likelier one. Probabilities are added up as whole numbers, 2**28
    of them the likeliest token's: the sum of the same numbers is the same in any order.

    Args:
        logits: NaN counts as -inf. A token of -inf is never kept.
        temperature: Probabilities are those of logits over it; in a row of 0 no token is dropped.
        top_k: Keep the k likeliest tokens, exactly; 0 is off.
        top_p: Then keep the fewest of the likeliest tokens that hold this share of what is left; 1 is off.
        min_p: Before both, drop the tokens less likely than this share of the likeliest one's probability; 0 is off.
        implementation: Which one to use; None lets dispatch choose.

    Raises:
        ValueError: A shape or dtype is wrong, or `implementation` is unknown.
        NotImplementedError: The implementation that was asked for refuses.
    """
    check_filters(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    operands = FiltersOperands(
        logits=jnp.asarray(logits).astype(jnp.float32),
        temperature=jnp.asarray(temperature),
        top_k=jnp.asarray(top_k),
        top_p=jnp.asarray(top_p),
        min_p=jnp.asarray(min_p),
    )
    num_rows, vocab_size = logits.shape
    call = FiltersCall(num_rows=num_rows, vocab_size=vocab_size, modes=modes_of(operands))
    kept = choose(call, implementation).implementation.run(call, operands)
    return kept & (operands.logits > -jnp.inf)
