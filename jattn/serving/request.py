"""Requests: what a caller asks for, and what the host knows of it while it is served."""

import dataclasses
import enum
import math
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jattn.arguments import whole_number
from jattn.serving.steps.logprobs import Logprob

FinishReason = Literal["stop", "length", "abort", "error"]


@typing.no_type_check  # it checks its values itself, and takes any integer type
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, when it ends, and what is told of it. Names and meanings are vLLM's.

    The logits of a token go through the bias, `min_tokens`, the penalties (repetition, frequency, presence) and the
    temperature; then min-p, top-k and top-p drop tokens, each from what the one before it leaves.

    Attributes:
        n: Sequences to generate; the i-th is what this request gives alone with the seed `seed + i`.
        max_tokens: Tokens to generate at most, in each sequence; the context's end may come earlier.
        min_tokens: Tokens before a stop token, the model's own included, or a stop string can end a sequence.
        temperature: 0 is greedy.
        top_k: Keep the k likeliest tokens; 0 or -1 is off.
        top_p: Then keep the smallest set of tokens that holds this probability; 1 is off.
        min_p: First drop the tokens less likely than this share of the likeliest one's probability; 0 is off.
        repetition_penalty: Divides the positive logits, and multiplies the negative ones, of the tokens that the prompt
            or the output has; 1 is off.
        presence_penalty: Taken from the logits of the tokens that the output has; 0 is off.
        frequency_penalty: Likewise, times how often the output has the token; 0 is off.
        logit_bias: Added to the logits of these token ids.
        seed: Of this request's randomness, below 2**32; None takes the request's number. A request's text depends on
            it and on no neighbour.
        logprobs: With each token give its log-probability, and those of so many of the likeliest; None gives nothing.
            They are the model's own, before any of the above.
        prompt_logprobs: Likewise for the tokens of the prompt.
        stop: Texts that end a sequence; its text stops before them.
        stop_token_ids: End a sequence, beside the model's own end tokens.
        ignore_eos: Do not end at the model's end tokens.
        include_stop_str_in_output: The text goes to the end of the stop string or token instead.
        skip_special_tokens: Leave special tokens out of the text.

    Raises:
        ValueError: A value is out of its range.
    """

    n: int = 1
    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = dataclasses.field(default=None, hash=False)
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self):
        rule = f"`n` must be a whole number of at least 1 and at most {_MOST_SEQUENCES}."
        checked = {
            "n": whole_number(self.n, rule, 1, _MOST_SEQUENCES + 1),
            "max_tokens": whole_number(self.max_tokens, "`max_tokens` must be a whole number of at least 1.", 1),
            "min_tokens": whole_number(self.min_tokens, "`min_tokens` must be a whole number of at least 0.", 0),
            "top_k": max(0, whole_number(self.top_k, "`top_k` must be a whole number of at least 0 (off).", -1, 2**31)),
            "stop": _texts(self.stop),
            "stop_token_ids": token_ids(() if self.stop_token_ids is None else self.stop_token_ids, "`stop_token_ids`"),
            "logit_bias": _bias(self.logit_bias),
        }
        if self.seed is not None:
            rule = "`seed` must be a whole number of at least 0 and below 2**32."
            checked["seed"] = whole_number(self.seed, rule, 0, 2**32)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                rule = f"`{name}` must be None (off) or a whole number of at least 0."
                checked[name] = whole_number(getattr(self, name), rule, 0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be True or False. Got {getattr(self, name)!r}.")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        for name, (holds, rule) in _NUMBERS.items():
            if not holds(_float(getattr(self, name))):
                raise ValueError(f"`{name}` must be {rule}. Got {getattr(self, name)!r}.")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"`min_tokens` must be at most `max_tokens`. Got min_tokens={self.min_tokens}, "
                f"max_tokens={self.max_tokens}."
            )
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"`n` must be 1 where `temperature` is 0: the sequences would be equal. Got {self.n}.")

    @property
    def has_logit_rules(self) -> bool:
        """Whether the logits change before the temperature."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(penalties != (1, 0, 0) or self.logit_bias or self.min_tokens)

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None or self.prompt_logprobs is not None

    def of_sequence(self, index: int) -> "SamplingParams":
        """What the sequence `index` of `n` asks for as a request of its own; the first brings the prompt's logprobs."""
        return dataclasses.replace(
            self,
            n=1,
            seed=None if self.seed is None else (self.seed + index) % 2**32,
            prompt_logprobs=None if index else self.prompt_logprobs,
        )


_MOST_SEQUENCES = 16384  # of a prompt; as in vLLM
_FLOAT32_MAX = 3.4028234e38  # the device computes in float32

_NUMBERS = {
    "temperature": (lambda x: 0 <= x <= _FLOAT32_MAX, "finite and at least 0 (greedy)"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1 (off)"),
    "min_p": (lambda x: 0 <= x <= 1, "at least 0 (off) and at most 1"),
    "repetition_penalty": (lambda x: 0 < x <= _FLOAT32_MAX, "finite and above 0; 1 is off"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "at least -2 and at most 2; 0 is off"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "at least -2 and at most 2; 0 is off"),
}


def _float(value: Any) -> float:
    """`value` as a float; NaN, which no range holds, if it is no number."""
    try:
        return math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _texts(values: Any) -> tuple[str, ...]:
    """Stop strings, from one or several; None is none."""
    if values is None or isinstance(values, str):
        values = () if values is None else (values,)
    is_several = isinstance(values, Iterable) and not isinstance(values, bytes | bytearray)
    texts: tuple[Any, ...] = tuple(values) if is_several else (values,)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"`stop` must be a text or several, none of them empty. Got {values!r}.")
    return texts


def _bias(values: Any) -> dict[int, float] | None:
    if values is None:
        return None
    rule = "`logit_bias` must map token ids to finite numbers."
    if not isinstance(values, Mapping):
        raise ValueError(f"{rule} Got {values!r}.")
    keys = [int(key) if isinstance(key, str) and key.isdecimal() else key for key in values]  # as JSON has them
    ids = token_ids(keys, "The token ids of `logit_bias`")
    bias = dict(zip(ids, map(_float, values.values()), strict=True))
    if not all(abs(value) <= _FLOAT32_MAX for value in bias.values()):
        raise ValueError(f"{rule} Got {values!r}.")
    return bias


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


@dataclasses.dataclass(kw_only=True)
class DraftCounts:
    """What became of drafted tokens, of one request or of several.

    Attributes:
        steps: Decode steps, one for each request that took part.
        tokens: Tokens that came of them.
        drafted: Tokens that were drafted for them.
        accepted: Drafted tokens that are among those that came.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def note_step(self, tokens: int, drafted: int, accepted: int) -> None:
        """Counts a step of one request."""
        self.steps += 1
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafted tokens that were accepted; None if none was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a decode step gives a request, in the mean; None if there was no step."""
        return self.tokens / self.steps if self.steps else None


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """The host's record of one request; the scheduler moves it from status to status.

    Attributes:
        number: Order of arrival; earlier requests are never preempted for later ones.
        prompt: Token ids.
        limit: Tokens at most, prompt included.
        stop_ids: Tokens that end it.
        generated: Tokens read back from the device so far.
        logprobs: Of each of them, by token id, if asked for.
        prompt_logprobs: Of the prompt's tokens but the first, by place and token id, as far as read; likewise.
        status: Where it stands.
        finish_reason: Why it ended; None before.
        row: Its row of the device's loop state while it has one.
        pages: Its pages of the pool, in order.
        num_cached: Its first tokens whose keys were in the pool when it was admitted.
        num_computed: Tokens whose keys are in the pool once all launches so far have run; at least.
        num_unsure: Drafted tokens of launches not read yet: so many more keys there may be.
        num_preemptions: How often it lost its pages to earlier requests.
        drafts: What became of the tokens drafted for it; requests may share their counts.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int]
    generated: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    prompt_logprobs: dict[int, dict[int, Logprob]] = dataclasses.field(default_factory=dict)
    status: RequestStatus = RequestStatus.NEW
    finish_reason: FinishReason | None = None
    row: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    num_cached: int = 0
    num_computed: int = 0
    num_unsure: int = 0
    num_preemptions: int = 0
    drafts: DraftCounts = dataclasses.field(default_factory=DraftCounts)

    @property
    def tokens(self) -> list[int]:
        """What a prefill must compute: the prompt, and what was generated before a preemption."""
        return self.prompt + self.generated

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def needs_full_steps(self) -> bool:
        """Whether steps that choose tokens and do no more cannot serve it."""
        return self.params.has_logit_rules or self.params.has_logprobs

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
