"""What a caller gets: deltas while a sequence is generated, and whole outputs made of them."""

import dataclasses
from collections.abc import Iterable, Sequence

from jattn.serving.frontend.byte_text import stream_decoder
from jattn.serving.frontend.stop_strings import StopStrings
from jattn.serving.frontend.text import Tokenizer
from jattn.serving.request import FinishReason, Request
from jattn.serving.steps.logprobs import Logprob

Logprobs = dict[int, Logprob]


@dataclasses.dataclass(frozen=True)
class Delta:
    """New text of one sequence.

    Attributes:
        index: Which prompt.
        text: May be empty while a character is incomplete, or what may become a stop string.
        token_ids: The tokens behind it.
        finish_reason: Set on the sequence's last delta.
        error: Why it ended, in a sentence, if the reason is "error".
        output_index: Which of the prompt's `n` sequences.
        stop_reason: The stop string, or the token of `stop_token_ids`, that ended it; None if neither did.
        logprobs: Of each token, by token id; None if not asked for.
        prompt_logprobs: With the prompt's first delta; see `RequestOutput`.
        num_cached_tokens: Tokens of the prompt that were not computed for this sequence: the prefix cache had their
            keys.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: str | None = None
    output_index: int = 0
    stop_reason: str | int | None = None
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    num_cached_tokens: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished sequence.

    Attributes:
        index: Which of the prompt's `n` sequences.
        token_ids: All of its tokens, those of a stop string included.
        error: Why it ended, in a sentence, if the reason is "error"; text and tokens are what came before.
        stop_reason: The stop string, or the token of `stop_token_ids`, that ended it; None if neither did.
        logprobs: Of each token, by token id; None if not asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[Logprobs, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of the whole sequence; None if none were asked for."""
        if self.logprobs is None:
            return None
        return sum(found[token].logprob for found, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt. `text`, `token_ids`, `finish_reason` and `error` are those of the first sequence.

    Attributes:
        outputs: Its `n` sequences.
        prompt_logprobs: Of each token of the prompt, by token id; None for the first one, which follows nothing. None
            in all if not asked for, or not all known when it ended.
        num_cached_tokens: Tokens of the prompt that were not computed for the first sequence: the prefix cache had
            their keys.
    """

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    num_cached_tokens: int = dataclasses.field(default=0, compare=False)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.outputs[0].error


def gather(prompts: Sequence[Sequence[int]], deltas: Iterable[Delta]) -> list[RequestOutput]:
    """The outputs of prompts, in their order, from all of their deltas in any order."""
    sequences: list[dict[int, list[Delta]]] = [{} for _ in prompts]
    for delta in deltas:
        sequences[delta.index].setdefault(delta.output_index, []).append(delta)
    return [
        RequestOutput(
            tuple(prompt),
            tuple(_completion(deltas) for _, deltas in sorted(of_prompt.items())),
            of_prompt[0][0].prompt_logprobs,
            of_prompt[0][0].num_cached_tokens,
        )
        for prompt, of_prompt in zip(prompts, sequences, strict=True)
    ]


def _completion(deltas: list[Delta]) -> Completion:
    last = deltas[-1]
    assert last.finish_reason
    asked = last.logprobs is not None
    return Completion(
        index=last.output_index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason,
        error=last.error,
        stop_reason=last.stop_reason,
        logprobs=tuple(found for delta in deltas for found in delta.logprobs or ()) if asked else None,
    )


class SequenceReader:
    """Turns the tokens that the engine has read for a request into deltas, up to a stop string.

    Attributes:
        request: The request; it may go on after a stop string until it is aborted.
        finished: Whether the last delta was given.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, *, index: int, output_index: int):
        params = request.params
        self.request = request
        self.finished = False
        self._tokenizer = tokenizer
        self._index, self._output_index = index, output_index
        self._decoder = stream_decoder(tokenizer, params.skip_special_tokens)
        self._stop = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._num_read = 0

    @property
    def has_news(self) -> bool:
        return self.request.finished or len(self.request.generated) > self._num_read

    def read(self) -> list[Delta]:
        """A delta for each new token; one more if the request has ended without one. No step may run meanwhile."""
        return self.read_to(len(self.request.generated), self.request.finish_reason)

    def read_to(self, end: int, reason: FinishReason | None) -> list[Delta]:
        """As `read`, of the first `end` tokens and why these are all; a step may run meanwhile."""
        deltas = []
        while not self.finished and (self._num_read < end or reason):
            tokens = tuple(self.request.generated[self._num_read : min(self._num_read + 1, end)])
            deltas.append(self._delta(tokens, reason if self._num_read + len(tokens) == end else None))
        return deltas

    def _delta(self, tokens: tuple[int, ...], reason: FinishReason | None) -> Delta:
        request, params = self.request, self.request.params
        is_first, begin = self._num_read == 0, self._num_read
        self._num_read += len(tokens)
        at_stop_token = reason == "stop" and tokens != () and tokens[-1] in request.stop_ids
        skips_stop_token = at_stop_token and not params.include_stop_str_in_output
        text = self._decoder.push(() if skips_stop_token or not params.detokenize else tokens)
        if reason:
            text += self._decoder.finish()
        text = self._stop.push(text, armed=self._num_read > params.min_tokens)
        stop_reason: str | int | None = self._stop.found
        if stop_reason is not None and reason not in ("error", "abort"):
            reason = "stop"
        elif reason:
            text += self._stop.finish()
            stop_reason = tokens[-1] if at_stop_token and tokens[-1] in params.stop_token_ids else None
        self.finished = reason is not None
        logprobs = None
        if params.logprobs is not None:
            logprobs = tuple(map(self._decoded, request.logprobs[begin : self._num_read]))
        return Delta(
            index=self._index,
            text=text,
            token_ids=tokens,
            finish_reason=reason,
            error=request.error if reason == "error" else None,
            output_index=self._output_index,
            stop_reason=stop_reason,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs() if is_first else None,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _prompt_logprobs(self) -> tuple[Logprobs | None, ...] | None:
        found, places = self.request.prompt_logprobs, range(1, len(self.request.prompt))
        if self.request.params.prompt_logprobs is None or len(found) < len(places) or self.request.error:
            return None
        return (None, *(self._decoded(found[place]) for place in places))

    def _decoded(self, found: Logprobs) -> Logprobs:
        """The same, with the tokens' texts."""
        if not self.request.params.detokenize:
            return found
        return {
            token: dataclasses.replace(logprob, decoded_token=self._tokenizer.decode([token], False))
            for token, logprob in found.items()
        }
