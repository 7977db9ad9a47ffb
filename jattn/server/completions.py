"""`POST /v1/completions`: prompts as texts or token ids, continued."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jattn.server import logprobs
from jattn.server.answers import Asked, Call, make_requests, read_params, respond
from jattn.server.bodies import flag, shortened, typed
from jattn.server.errors import refusals
from jattn.server.sampling_fields import refuse_unserved
from jattn.server.service import Service
from jattn.serving.frontend.outputs import Completion, Delta, Logprobs, RequestOutput
from jattn.serving.frontend.text import Tokenizer

_MAX_TOKENS = 16  # as in vLLM


async def completions(request: Request) -> Response:
    return await respond(request, _read)


def _read(service: Service, request: Request, body: dict[str, Any]) -> Asked:
    """What a body asks for, tokenised and checked."""
    with refusals():
        refuse_unserved(body)
        call = Call.of(service, request, body, "cmpl")
        echo, asked = flag(body, "echo"), typed(body, "logprobs", int, "a whole number")
        max_tokens = typed(body, "max_tokens", int, "a whole number", _MAX_TOKENS)
        if max_tokens == 0 and echo:
            call, max_tokens = dataclasses.replace(call, computes_no_token=True), 1
        params = read_params(service, call, body, max_tokens=max_tokens, logprobs=asked)
        if echo and asked is not None:
            if params.n > 1 and call.streamed:
                raise ValueError(f"`n` must be 1 where `echo` and `logprobs` are streamed. Got {params.n}.")
            params = dataclasses.replace(params, prompt_logprobs=max(asked, params.prompt_logprobs or 0))
        tokenizer = service.llm.tokenizer
        special = flag(body, "add_special_tokens", True)
        prompts = _prompts(body.get("prompt"))
        ids = [tokenizer.encode(p, add_special_tokens=special) if isinstance(p, str) else p for p in prompts]
        of_prompts = make_requests(service, body, ids, params)
    texts = [p if isinstance(p, str) else tokenizer.decode(p, params.skip_special_tokens) for p in prompts]
    form = CompletionForm(
        call,
        tokenizer,
        prompts=[(text, of_prompt[0].prompt) for text, of_prompt in zip(texts, of_prompts, strict=True)],
        n=params.n,
        echo=echo,
        logprobs=asked,
        gives_prompt_logprobs="prompt_logprobs" in body,
    )
    return call, form, of_prompts


def _prompts(given: Any) -> list[str | list[Any]]:
    """Texts or lists of token ids, from one or several; whether the ids are ids is for the engine to say.

    Raises:
        ValueError: They are neither.
    """
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        given = [given]
    if not isinstance(given, list) or not given or not all(isinstance(prompt, str | list) for prompt in given):
        raise ValueError(f"`prompt` must be a text, token ids, or a list of either. Got {shortened(given)}.")
    return given


@dataclasses.dataclass
class _Place:
    """Where a streamed sequence is: characters that its tokens had so far, and whether it has begun."""

    offset: int = 0
    begun: bool = False


class CompletionForm:
    """Texts in choices; with `echo` each begins with its prompt.

    Args:
        prompts: Text and token ids of each.
        logprobs: How many of the likeliest tokens each place has beside its own; None for no log-probabilities.
    """

    whole = chunk = "text_completion"

    def __init__(
        self,
        call: Call,
        tokenizer: Tokenizer,
        *,
        prompts: Sequence[tuple[str, list[int]]],
        n: int,
        echo: bool,
        logprobs: int | None,
        gives_prompt_logprobs: bool,
    ):
        self._call = call
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._n = n
        self._echo = echo
        self._logprobs = logprobs
        self._gives_prompt_logprobs = gives_prompt_logprobs
        self._places: dict[tuple[int, int], _Place] = {}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        where = delta.index, delta.output_index
        if (place := self._places.get(where)) is None:
            place = self._places[where] = _Place()
        echoes = self._echo and not place.begun
        prompt = self._prompts[delta.index]
        shown = echoes or (self._call.return_token_ids and delta.token_ids) or (self._logprobs is not None)
        if not (delta.text or delta.finish_reason or shown):
            return []
        of_prompt = delta.prompt_logprobs if echoes else None
        choice = self._choice(delta, prompt[0] if echoes else "", prompt[1], of_prompt, place)
        choice["index"] = delta.index * self._n + delta.output_index
        if self._call.return_token_ids and not place.begun:
            choice["prompt_token_ids"] = prompt[1]
        place.begun = True
        return [choice]

    def answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for (text, ids), output in zip(self._prompts, outputs, strict=True):
            for completion in output.outputs:
                of_prompt = output.prompt_logprobs if self._echo else None
                choice = self._choice(completion, text if self._echo else "", ids, of_prompt, _Place())
                choice["index"] = len(choices)
                if self._gives_prompt_logprobs:
                    choice["prompt_logprobs"] = logprobs.for_prompt(output.prompt_logprobs)
                if self._call.return_token_ids:
                    choice["prompt_token_ids"] = ids
                choices.append(choice)
        return {"choices": choices}

    def _choice(
        self,
        part: Delta | Completion,
        before: str,
        prompt: list[int],
        of_prompt: Sequence[Logprobs | None] | None,
        place: _Place,
    ) -> dict[str, Any]:
        found = None
        if self._logprobs is not None:
            tokens, of_tokens = list(part.token_ids), list(part.logprobs or ())
            if of_prompt is not None:
                tokens, of_tokens = [*prompt, *tokens], [*of_prompt, *of_tokens]
            as_ids = self._call.names_are_ids
            found = logprobs.for_completion(tokens, of_tokens, place.offset, self._tokenizer, as_ids=as_ids)
            place.offset += sum(map(len, found["tokens"]))
        choice = {
            "index": 0,
            "text": before + part.text,
            "logprobs": found,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        return choice | ({"token_ids": list(part.token_ids)} if self._call.return_token_ids else {})
