"""What a speculative pass knows beside its batch; SGLang's names."""

import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jattn.arguments import array, integers
from jattn.pytree import pytree


@pytree(kw_only=True)
class EagleDraftInput:
    """What the draft model starts from; its presence in a decode batch says that tokens are drafted.

    Attributes:
        topk_p, topk_index: Each row's likeliest tokens and their probabilities.
        hidden_states: The target model's, of the tokens in `verified_id`.
        verified_id: The newest token of each row that the target model accepted.
        accept_length: How many drafted tokens of each row it accepted.
    """

    topk_p: Float[Array, "B topk"] | None = None
    topk_index: Int[Array, "B topk"] | None = None
    hidden_states: Float[Array, "B D"] | None = None
    verified_id: Int[Array, " B"] | None = None
    accept_length: Int[Array, " B"] | None = None


@pytree(kw_only=True)
class EagleVerifyInput:
    """The drafted tokens that the target model checks, D a row: a chain, or a tree if it has a mask.

    Attributes:
        draft_token: Row by row.
        custom_mask: Per row [D, seq_len + D] row-major, one after the other: which keys a drafted token sees. None for
            a chain. It may be longer; one that is too short is refused where the lengths are known, and inside jit
            what it lacks is not seen.
        positions: Absolute positions of the drafted tokens, seq_len + depth; those of a chain if None.
        retrive_index: Where each token of a row's tree is in `draft_token`.
        retrive_next_token: Each one's first child; -1 for none.
        retrive_next_sibling: Each one's next sibling; -1 for none.
    """

    draft_token: Int[Array, " T"] | None = None
    custom_mask: Bool[Array, " M"] | None = None
    positions: Int[Array, " T"] | None = None
    retrive_index: Int[Array, "B D"] | None = None
    retrive_next_token: Int[Array, "B D"] | None = None
    retrive_next_sibling: Int[Array, "B D"] | None = None


SpecInput = EagleDraftInput | EagleVerifyInput


def tree_of(
    spec_info: EagleVerifyInput, seq_lens: Int[Array, " B"], drafted: int
) -> tuple[Bool[Array, " M"] | None, Int[Array, " T"] | None]:
    """The mask and the positions of drafted tokens, as arrays of JAX; None where they are not given.

    Args:
        seq_lens: Keys of each row without the drafted ones; 0 is padding.
        drafted: Tokens a row.

    Raises:
        ValueError: They are no arrays, the positions are not of as many tokens, or the mask, where the lengths are
            known, has less than drafted * (seq_len + drafted) bits a row.
    """
    mask, positions = spec_info.custom_mask, spec_info.positions
    mask = None if mask is None else array("custom_mask", mask, "bits")
    positions = None if positions is None else integers("positions", positions, "tokens")
    num_tokens = seq_lens.shape[0] * drafted
    if positions is not None and positions.shape[0] != num_tokens:
        raise ValueError(
            f"`positions` of `spec_info` must be those of {num_tokens} drafted tokens. Got {positions.shape[0]}."
        )
    if mask is not None and not isinstance(seq_lens, Tracer):
        lens = np.asarray(seq_lens)
        bits = int((lens + drafted)[lens > 0].sum()) * drafted
        if mask.shape[0] < bits:
            raise ValueError(
                f"`custom_mask` of `spec_info` must have at least {bits} bits, [{drafted}, seq_len + {drafted}] a row. "
                f"Got {mask.shape[0]}."
            )
    return mask, positions
