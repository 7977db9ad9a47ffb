"""What a speculative pass knows beside its batch; SGLang's names."""

import dataclasses
import functools
import typing

import jax
from jaxtyping import Array, Bool, Float, Int

from jattn.arguments import array, integers


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
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


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleVerifyInput:
    """The drafted tokens that the target model checks, D a row: a chain, or a tree if it has a mask.

    Attributes:
        draft_token: Row by row.
        custom_mask: Per row [D, seq_len + D] row-major, one after the other: which keys a drafted token sees. None for
            a chain.
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


def tree_of(spec_info: EagleVerifyInput, num_tokens: int) -> tuple[Bool[Array, " M"] | None, Int[Array, " T"] | None]:
    """The mask and the positions of drafted tokens, as arrays of JAX; None where they are not given.

    Args:
        num_tokens: The drafted tokens of all rows.

    Raises:
        ValueError: They are no arrays, or the positions are not of as many tokens.
    """
    mask, positions = spec_info.custom_mask, spec_info.positions
    mask = None if mask is None else array("custom_mask", mask, "bits")
    positions = None if positions is None else integers("positions", positions, "tokens")
    if positions is not None and positions.shape[0] != num_tokens:
        raise ValueError(
            f"`positions` of `spec_info` must be those of {num_tokens} drafted tokens. Got {positions.shape[0]}."
        )
    return mask, positions
