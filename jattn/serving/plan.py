"""Plans: what the policy asks of one launch, in requests and tokens."""

import dataclasses
from collections.abc import Sequence

from jattn.serving.request import Request


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a request's tokens to compute in one prefill launch.

    Attributes:
        start, stop: Positions, the second one excluded.
        begin: Position behind the tokens of the chunk before it. Nothing computes those from here to `start`: their
            keys are in the pool.
        is_last: Whether it ends the prefill, so that its last token yields a new one.
    """

    request: Request
    begin: int
    start: int
    stop: int
    is_last: bool

    @property
    def is_first(self) -> bool:
        """Whether it is the request's first since it was admitted, so that its row starts anew."""
        return self.begin == 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """One launch.

    Attributes:
        decoding: Requests that get their next token, or several where tokens are drafted.
        chunks: Parts of prompts computed beside them; a launch without any is a decode.
    """

    decoding: Sequence[Request] = ()
    chunks: Sequence[Chunk] = ()
