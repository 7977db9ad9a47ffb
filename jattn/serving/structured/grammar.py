"""Grammar: where a sequence stands in what its text must look like, and which tokens may come next."""

from collections.abc import Sequence
from typing import Any, Literal

_NOWHERE = -1
_LONGEST_REASON = 400  # characters: some repeat all of an expression


def reason_of(told: str) -> str:
    """What llguidance says is wrong, as the end of a sentence."""
    reason = " ".join(told.partition("<non-verbose/>")[0].split()).rstrip(".")
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."


class Grammar:
    """One sequence's place in a grammar; it follows the sequence's tokens.

    For one thread at a time. A call that is cut short loses nothing: the next one follows all tokens anew.

    Args:
        begin: llguidance's matcher before the first token; others may share it, and it stays as it is.
        num_tokens: That it knows.
        end_ids: Those that it takes for the end of the text.
        after: The token that it begins behind, as an answer begins behind a model's thoughts; None is from the first
            token on.

    Attributes:
        has_begun: Whether it has a say in which tokens may come.
    """

    def __init__(self, begin: Any, num_tokens: int, end_ids: frozenset[int], after: int | None = None):
        self.num_tokens = num_tokens
        self.end_ids = end_ids
        self.has_begun = after is None
        self._after = after
        self._begin = begin
        self._matcher = begin.deep_copy()
        self._num_followed = 0
        self._ended = False

    def fork(self, after: int | None = None) -> "Grammar":
        """The same grammar for another sequence, before its first token, or behind its first token `after`."""
        return Grammar(self._begin, self.num_tokens, self.end_ids, after)

    def follow(self, tokens: Sequence[int]) -> None:
        """Goes to where the sequence is after `tokens`, all that it has so far."""
        begin, self._num_followed = self._num_followed, _NOWHERE
        if begin == _NOWHERE:
            self._matcher, self.has_begun, begin = self._begin.deep_copy(), self._after is None, 0
        for token in tokens[begin:]:
            if self.has_begun:
                self._matcher.consume_token(token)
            self.has_begun |= token == self._after
        self._num_followed = len(tokens)

    def end(self) -> None:
        """Notes that the text is whole: nothing may follow but what its request does not end at."""
        self._ended = True

    @property
    def finish_reason(self) -> Literal["stop", "error"] | None:
        """Why nothing may follow: the text is whole, or it can no longer be; None if something may.

        That a text is whole may show only once `matcher` was asked for the next tokens.
        """
        if self._matcher.is_error():
            return "error"
        return "stop" if self._ended or self._matcher.is_stopped() else None

    @property
    def failure(self) -> str | None:
        """Why llguidance goes no further, as when a limit of its own is passed; None if it does."""
        return reason_of(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def matcher(self) -> Any:
        """llguidance's matcher, which knows the tokens that may come next."""
        return self._matcher
