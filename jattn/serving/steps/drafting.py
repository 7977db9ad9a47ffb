"""Drafting: who proposes the tokens that a step verifies; prompt lookup, which needs no model."""

import dataclasses
import typing
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jattn.arguments import whole_number
from jattn.backend import AttentionBackend
from jattn.kv_pool import KVPool
from jattn.serving.speculation import Speculation
from jattn.serving.steps.loop_state import LoopState

_UNROLLED = 4  # steps of a lookup that are one kernel; more of them only make it longer to compile
NO_DRAFT = -1  # in a drafted token's place: none is proposed


@typing.runtime_checkable
class Drafter(Protocol):
    """Proposes tokens on the device; static and hashable."""

    @property
    def num_draft_tokens(self) -> int:
        """Tokens proposed for a row in each step at most."""
        ...

    def propose(
        self,
        model: Any,
        backend: AttentionBackend,
        pool: KVPool,
        values: LoopState,
        live: Bool[Array, " B"],
        *,
        greedy_only: bool,
    ) -> tuple[Int[Array, "B drafts"], KVPool]:
        """The tokens that may follow each live row's newest one, NO_DRAFT past the last; and the pool.

        Args:
            model: The engine's.
            backend: Attention for every layer.
            values: The rows.
            greedy_only: Every row has temperature 0.
        """
        ...


def check_drafter(value: Any) -> None:
    """Says whether `value` may be an engine's `speculative`.

    Raises:
        ValueError: It is neither None nor a drafter.
    """
    if value is not None and (isinstance(value, type) or not isinstance(value, Drafter)):
        raise ValueError(f"`speculative` must be None (off), an NgramDrafting or a DraftModel. Got {value!r}.")


def check_drafter_fits(drafter: Speculation, max_context_len: int) -> None:
    """Says whether a drafter proposes, and looks for, fewer tokens than a request has at most.

    Raises:
        ValueError: It does not.
    """
    sizes = {"num_draft_tokens": drafter.num_draft_tokens}
    if isinstance(drafter, NgramDrafting):
        sizes["max_ngram"] = drafter.max_ngram
    for name, size in sizes.items():
        if size >= max_context_len:
            raise ValueError(
                f"`{name}` of `speculative` must be below `max_context_len`, {max_context_len}. Got {name}={size}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramDrafting:
    """Prompt lookup: the text's last few tokens, found earlier in it, and what followed them there.

    Of all earlier places where the last `max_ngram` tokens stand, the latest is taken; if there is none, of those where
    one token less stands, and so on. Past the text's end the proposal goes on with itself, as a text that repeats does.

    Attributes:
        num_draft_tokens: Tokens proposed for a row in each step.
        max_ngram, min_ngram: Tokens to look for, at most and at least.

    Raises:
        ValueError: A number is out of range.
    """

    num_draft_tokens: int = 4
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self):
        for name in ("num_draft_tokens", "max_ngram", "min_ngram"):
            rule = f"`{name}` must be a whole number of at least 1."
            object.__setattr__(self, name, whole_number(getattr(self, name), rule, 1))
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"`min_ngram` must be at most `max_ngram`. Got min_ngram={self.min_ngram}, max_ngram={self.max_ngram}."
            )

    def propose(
        self,
        model: Any,
        backend: AttentionBackend,
        pool: KVPool,
        values: LoopState,
        live: Bool[Array, " B"],
        *,
        greedy_only: bool,
    ) -> tuple[Int[Array, "B drafts"], KVPool]:
        assert values.tokens is not None
        assert values.tokens.ids is not None
        lengths = jnp.where(live, values.seq_lens + 1, 0)
        return self.lookup(values.tokens.ids, lengths), pool

    def lookup(self, token_ids: Int[Array, "B L"], lengths: Int[Array, " B"]) -> Int[Array, "B drafts"]:
        """The proposal for each text, NO_DRAFT where its last tokens are found nowhere earlier.

        Args:
            token_ids: By position.
            lengths: Tokens of each text.
        """
        place = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        last = lengths[:, None] - 1

        def one_more(back, found):
            same, matched, shifted = found
            wanted = jnp.take_along_axis(token_ids, jnp.maximum(last - back, 0), axis=1)
            same &= (shifted == wanted) & (place >= back)
            return same, matched + same.astype(jnp.int32), jnp.roll(shifted, 1, axis=1)

        none_yet = place < last, jnp.zeros(token_ids.shape, jnp.int32), token_ids
        _, matched, _ = lax.fori_loop(0, self.max_ngram, one_more, none_yet, unroll=min(self.max_ngram, _UNROLLED))
        longest = jnp.max(matched, axis=1, keepdims=True)
        end = jnp.max(jnp.where(matched == longest, place, 0), axis=1, keepdims=True)
        ahead = jnp.arange(self.num_draft_tokens, dtype=jnp.int32)[None] % jnp.maximum(last - end, 1)
        found = jnp.take_along_axis(token_ids, end + 1 + ahead, axis=1, mode="fill", fill_value=NO_DRAFT)
        return jnp.where(longest >= self.min_ngram, found, NO_DRAFT)
