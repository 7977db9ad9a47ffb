"""Requests: what a caller asks for, and what the host knows of it while it is served."""

import dataclasses
import enum
import math
import operator
import typing
from collections.abc import Iterable
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@typing.no_type_check  # it checks its values itself, and takes any integer type
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
        whole = {
            "max_tokens": whole_number(self.max_tokens, "`max_tokens` must be a whole number of at least 1.", 1),
            "top_k": whole_number(self.top_k, "`top_k` must be a whole number of at least 0 (off).", 0, 2**31),
            "stop_token_ids": token_ids(self.stop_token_ids, "`stop_token_ids`"),
        }
        if self.seed is not None:
            rule = "`seed` must be a whole number of at least 0 and below 2**32."
            whole["seed"] = whole_number(self.seed, rule, 0, 2**32)
        for name, value in whole.items():
            object.__setattr__(self, name, value)
        if not (0 <= self.temperature < math.inf):
            raise ValueError(f"`temperature` must be finite and at least 0 (greedy). Got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be above 0 and at most 1 (off). Got {self.top_p}.")


def whole_number(value: Any, rule: str, least: int, below: int | float = math.inf) -> int:
    """`value` as an int, of whatever integer type it was.

    Raises:
        ValueError: It is no integer, or out of range; the message is `rule` and the value.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number < below:
        raise ValueError(f"{rule} Got {value!r}.")
    return number


def token_ids(values: Any, what: str, below: int = 2**31) -> tuple[int, ...]:
    """Token ids as ints, from a sequence or array of any integer type.

    Raises:
        ValueError: They are no such sequence, or one is out of range; the message begins with `what`.
    """
    rule = f"{what} must be whole numbers at least 0 and below {below}."
    if isinstance(values, bytes | bytearray) or not isinstance(values, Iterable):
        raise ValueError(f"{rule} Got {values!r}.")
    return tuple(whole_number(value, rule, 0, below) for value in values)


class RequestStatus(enum.Enum):
    NEW = enum.auto()
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
        num_preemptions: How often it lost its pages to earlier requests.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int]
    generated: list[int] = dataclasses.field(default_factory=list)
    status: RequestStatus = RequestStatus.NEW
    finish_reason: FinishReason | None = None
    row: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    num_preemptions: int = 0

    @property
    def tokens(self) -> list[int]:
        """What a prefill must compute: the prompt, and what was generated before a preemption."""
        return self.prompt + self.generated

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def error(self) -> str | None:
        """Why it ended by an error, in a sentence; None if it did not."""
        if self.finish_reason != "error":
            return None
        return (
            f"The model's logits after {self.num_tokens} tokens are NaN or infinite: "
            "the weights are not finite, or the dtype is too narrow for them."
        )

    @property
    def at_limit(self) -> bool:
        """Whether the launches so far already yield the last token it may have."""
        return self.num_computed + 1 >= self.limit
