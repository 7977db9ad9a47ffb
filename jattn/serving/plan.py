"""Plans: what the policy asks of one launch, in requests and tokens."""

import dataclasses
from collections.abc import Sequence

from jattn.serving.request import Request


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a request's tokens to compute in one prefill launch.

    Attributes:
        start, stop: Positions, the second one excluded.
        is_first: Whether it is the request's first since it was admitted, so that its row starts anew; `start` need not
            be 0.
        is_last: Whether it ends the prefill, so that its last token yields a new one.
    """

    request: Request
    start: int
    stop: int
    is_first: bool
    is_last: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """One launch.

    Attributes:
        decoding: Requests that get their next token, or several where tokens are drafted.
        chunks: Parts of prompts computed beside them; a launch without any is a decode.
    """

    decoding: Sequence[Request] = ()
    chunks: Sequence[Chunk] = ()
