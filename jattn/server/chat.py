"""`POST /v1/chat/completions`: the assistant's answer to a conversation."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jattn.server import logprobs
from jattn.server.answers import Asked, Call, make_requests, read_params, respond
from jattn.server.bodies import flag, typed
from jattn.server.chat_prompt import chat_tokens
from jattn.server.errors import refusals
from jattn.server.sampling_fields import refuse_unserved
from jattn.server.service import Service
from jattn.serving.frontend.outputs import Completion, Delta, RequestOutput


async def chat_completions(request: Request) -> Response:
    return await respond(request, _read)


def _read(service: Service, request: Request, body: dict[str, Any]) -> Asked:
    """What a body asks for, tokenised and checked."""
    with refusals():
        refuse_unserved(body)
        if flag(body, "echo"):
            raise ValueError("`echo` is not served here: leave it out. Got True.")
        call = Call.of(service, request, body, "chatcmpl")
        top = typed(body, "top_logprobs", int, "a whole number", 0)
        asked = top if flag(body, "logprobs") else None
        if top and asked is None:
            raise ValueError(f"`top_logprobs` needs `logprobs`. Got {top}.")
        rule = "a whole number of at least 1"
        most = typed(body, "max_completion_tokens", int, rule, typed(body, "max_tokens", int, rule))
        params = read_params(service, call, body, max_tokens=most, logprobs=asked)
        ids = chat_tokens(service, body)
        of_prompts = make_requests(service, body, [ids], params)
    form = ChatForm(call, prompt=ids, logprobs=asked, gives_prompt_logprobs=params.prompt_logprobs is not None)
    return call, form, of_prompts


class ChatForm:
    """Messages in choices; a streamed one is its role, then texts, then why it ended.

    Args:
        logprobs: How many of the likeliest tokens each place has; None for no log-probabilities.
    """

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, call: Call, *, prompt: list[int], logprobs: int | None, gives_prompt_logprobs: bool):
        self._call = call
        self._prompt = prompt
        self._logprobs = logprobs
        self._gives_prompt_logprobs = gives_prompt_logprobs
        self._begun: set[int] = set()

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        index, choices = delta.output_index, []
        if index not in self._begun:
            self._begun.add(index)
            choices.append(_chunk(index, {"role": "assistant", "content": ""}))
            if self._call.return_token_ids:
                choices[-1]["prompt_token_ids"] = self._prompt
        if delta.text or (delta.token_ids and (self._logprobs is not None or self._call.return_token_ids)):
            choice = _chunk(index, {"content": delta.text}) | {"logprobs": self._found(delta)}
            if self._call.return_token_ids:
                choice["token_ids"] = list(delta.token_ids)
            choices.append(choice)
        if delta.finish_reason:
            ends = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            choices.append(_chunk(index, {}) | ends)
        return choices

    def answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        choices = []
        for completion in output.outputs:
            choice = {
                "index": completion.index,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                "logprobs": self._found(completion),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            if self._call.return_token_ids:
                choice["token_ids"] = list(completion.token_ids)
            choices.append(choice)
        answer: dict[str, Any] = {"choices": choices}
        if self._gives_prompt_logprobs:
            answer["prompt_logprobs"] = logprobs.for_prompt(output.prompt_logprobs)
        if self._call.return_token_ids:
            answer["prompt_token_ids"] = self._prompt
        return answer

    def _found(self, part: Delta | Completion) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        as_ids = self._call.names_are_ids
        return logprobs.for_chat(part.token_ids, part.logprobs or (), self._logprobs, as_ids=as_ids)


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
