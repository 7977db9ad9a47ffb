"""Requests: what a caller asks for, and what the host knows of it while it is served."""

import dataclasses
import enum
import math
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen.

    Attributes:
        max_tokens: Tokens to generate at most; the context's end may come earlier.
        temperature: 0 is greedy.
        top_k: Keep the k likeliest tokens; 0 is off.
        top_p: Then keep the smallest set of tokens that holds this probability; 1 is off.
        seed: Of this request's randomness, below 2**32; None takes the request's number. A request's text depends on
            it and on no neighbour.
        stop_token_ids: End the request, beside the model's own end tokens.
        ignore_eos: Do not end at the model's end tokens.

    Raises:
        ValueError: A value is out of its range.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"`max_tokens` must be at least 1. Got {self.max_tokens}.")
        if not (0 <= self.temperature < math.inf):
            raise ValueError(f"`temperature` must be finite and at least 0 (greedy). Got {self.temperature}.")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"`top_k` must be at least 0 (off). Got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be above 0 and at most 1 (off). Got {self.top_p}.")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` must be at least 0 and below 2**32. Got {self.seed}.")


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    PREFILL = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """The host's record of one request; the scheduler moves it from status to status.

    Attributes:
        number: Order of arrival; earlier requests are never preempted for later ones.
        prompt: Token ids.
        limit: Tokens at most, prompt included.
        stop_ids: Tokens that end it.
        generated: Tokens read back from the device so far.
        status: Where it stands.
        finish_reason: Why it ended; None before.
        row: Its row of the device's loop state while it has one.
        pages: Its pages of the pool, in order.
        num_computed: Tokens whose keys are in the pool once all launches so far have run.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int]
    generated: list[int] = dataclasses.field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    row: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0

    @property
    def tokens(self) -> list[int]:
        """What a prefill must compute: the prompt, and what was generated before a preemption."""
        return self.prompt + self.generated

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def at_limit(self) -> bool:
        """Whether the launches so far already yield the last token it may have."""
        return self.num_computed + 1 >= self.limit
