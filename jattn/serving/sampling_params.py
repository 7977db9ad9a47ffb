"""SamplingParams: what a caller asks of a request, as in vLLM."""

import dataclasses
import math
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from jattn.arguments import whole_number
from jattn.serving.structured.params import StructuredOutputsParams


@typing.no_type_check  # it checks its values itself, and takes any integer type
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, when it ends, and what is told of it. Names and meanings are vLLM's;
    `max_tokens` is 128 by default, where vLLM's is 16.

    The logits of a token go through the bias, `min_tokens`, the penalties (repetition, frequency, presence) and the
    temperature; then min-p, top-k and top-p drop tokens, each from what the one before it leaves.

    Attributes:
        n: Sequences to generate; the i-th is what this request gives alone with the seed `seed + i`.
        max_tokens: Tokens to generate at most, in each sequence; the context's end may come earlier. None is up to
            there.
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
        allowed_token_ids: The only tokens that may come.
        bad_words: Words that may not come, each of them one token, alone or after a space; `LLM` has the tokenizer for
            it.
        seed: Of this request's randomness, below 2**32; None and -1 take the request's number. A request's text depends
            on it and on no neighbour.
        logprobs: With each token give its log-probability, and those of so many of the likeliest; None gives nothing,
            -1 all of the vocabulary. They are the model's own, before any of the above.
        prompt_logprobs: Likewise for the tokens of the prompt.
        stop: Texts that end a sequence; its text stops before them.
        stop_token_ids: End a sequence, beside the model's own end tokens.
        ignore_eos: Do not end at the model's end tokens.
        include_stop_str_in_output: The text goes to the end of the stop string or token instead.
        skip_special_tokens: Leave special tokens out of the text.
        detokenize: Whether there is a text.
        truncate_prompt_tokens: Serve the prompt's last tokens alone, so many of them; -1 as many as the context takes.
        structured_outputs: What the text must look like, a `StructuredOutputsParams`; `LLM` has the tokenizer for it.
            Where nothing may follow any more, the text ends, with no end token and even if `ignore_eos`.
        spaces_between_special_tokens, output_kind: Of vLLM; here they can only be left as they are.

    Raises:
        ValueError: A value is out of its range.
    """

    n: int = 1
    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = dataclasses.field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    spaces_between_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: None = None

    def __post_init__(self):
        rule = f"`n` must be a whole number of at least 1 and at most {_MOST_SEQUENCES}."
        checked = {
            "n": whole_number(self.n, rule, 1, _MOST_SEQUENCES + 1),
            "min_tokens": whole_number(self.min_tokens, "`min_tokens` must be a whole number of at least 0.", 0),
            "top_k": max(0, whole_number(self.top_k, "`top_k` must be a whole number of at least 0 (off).", -1, 2**31)),
            "stop": _texts("stop", self.stop),
            "bad_words": _texts("bad_words", self.bad_words),
            "stop_token_ids": token_ids(() if self.stop_token_ids is None else self.stop_token_ids, "`stop_token_ids`"),
            "logit_bias": _bias(self.logit_bias),
        }
        if self.max_tokens is not None:
            rule = "`max_tokens` must be None (up to the context's end) or a whole number of at least 1."
            checked["max_tokens"] = whole_number(self.max_tokens, rule, 1)
        if self.allowed_token_ids is not None:
            checked["allowed_token_ids"] = token_ids(self.allowed_token_ids, "`allowed_token_ids`")
            if not checked["allowed_token_ids"]:
                raise ValueError("`allowed_token_ids` must be None (all) or at least one token. Got none.")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            rule = "`truncate_prompt_tokens` must be None (off), -1 or a whole number of at least 1."
            checked["truncate_prompt_tokens"] = whole_number(self.truncate_prompt_tokens, rule, 1)
        if self.seed == -1:
            checked["seed"] = None
        elif self.seed is not None:
            rule = "`seed` must be a whole number of at least 0 and below 2**32."
            checked["seed"] = whole_number(self.seed, rule, 0, 2**32)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                rule = f"`{name}` must be None (off), -1 (all) or a whole number of at least 0."
                checked[name] = whole_number(getattr(self, name), rule, -1)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be True or False. Got {getattr(self, name)!r}.")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        for name, (holds, rule) in _NUMBERS.items():
            if not holds(_float(getattr(self, name))):
                raise ValueError(f"`{name}` must be {rule}. Got {getattr(self, name)!r}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"`min_tokens` must be at most `max_tokens`. Got min_tokens={self.min_tokens}, "
                f"max_tokens={self.max_tokens}."
            )
        if self.stop and not self.detokenize:
            raise ValueError(f"`stop` needs `detokenize`: there is no text to look in. Got stop={self.stop!r}.")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError(
                f"`structured_outputs` must be None or a StructuredOutputsParams. Got {self.structured_outputs!r}."
            )
        for name, only in _NOT_SERVED.items():
            if getattr(self, name) is not only:
                raise ValueError(f"`{name}` must be {only}: nothing else is served yet. Got {getattr(self, name)!r}.")

    @property
    def has_logit_rules(self) -> bool:
        """Whether the logits change before the temperature."""
        of_tokens = self.logit_bias or self.min_tokens or self.allowed_token_ids or self.bad_words
        return bool(self.has_penalties or of_tokens)

    @property
    def has_penalties(self) -> bool:
        """Whether the logits change by the tokens that came before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

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
_NOT_SERVED = {"spaces_between_special_tokens": True, "output_kind": None}
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


def _texts(name: str, values: Any) -> tuple[str, ...]:
    """Texts, from one or several; None is none."""
    if values is None or isinstance(values, str):
        values = () if values is None else (values,)
    is_several = isinstance(values, Iterable) and not isinstance(values, bytes | bytearray)
    texts: tuple[Any, ...] = tuple(values) if is_several else (values,)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"`{name}` must be a text or several, none of them empty. Got {values!r}.")
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
