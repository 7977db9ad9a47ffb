"""Answers of both completion endpoints: what they have in common, streamed or whole."""

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from jattn.server.bodies import flag, shortened, typed
from jattn.server.errors import ApiError
from jattn.server.event_stream import KEEP_ALIVE, EventStream, as_json, event, while_connected
from jattn.server.output_stream import OutputStream, merged
from jattn.server.service import Service
from jattn.serving import request as engine_request
from jattn.serving.frontend.outputs import Delta, RequestOutput, gather


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What a body says of its answer, whichever endpoint it came to.

    Attributes:
        include_usage: Whether a stream ends with the counts of tokens.
        continuous_usage: Whether each of its events has them.
        return_token_ids: Whether token ids are given beside texts.
        names_are_ids: Whether log-probabilities name tokens by their ids.
        computes_no_token: Whether `max_tokens` is 0: the prompt is all that is wanted, and a token is dropped.
    """

    id: str
    model: str
    created: int
    streamed: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    names_are_ids: bool
    computes_no_token: bool = False

    @classmethod
    def of(cls, service: Service, request: Request, body: dict[str, Any], prefix: str) -> "Call":
        """What a body says.

        Raises:
            ValueError: A field has another type than it should.
            ApiError: It asks for another model.
        """
        streamed = flag(body, "stream")
        options = typed(body, "stream_options", dict, "an object", {})
        if options and not streamed:
            raise ValueError(f"`stream_options` needs `stream`. Got {shortened(options)}.")
        given = typed(body, "request_id", str, "a text") or request.headers.get("x-request-id") or uuid.uuid4().hex
        return cls(
            id=f"{prefix}-{given}",
            model=service.model_name(body),
            created=int(time.time()),
            streamed=streamed,
            include_usage=flag(options, "include_usage"),
            continuous_usage=flag(options, "continuous_usage_stats"),
            return_token_ids=flag(body, "return_token_ids"),
            names_are_ids=flag(body, "return_tokens_as_token_ids"),
        )


class Form(Protocol):
    """How an endpoint words its answers.

    Attributes:
        whole, chunk: What `object` is, of an answer and of an event.
    """

    whole: str
    chunk: str

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the events that a delta becomes, one each; maybe none."""
        ...

    def answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The choices of a whole answer, and what else it has."""
        ...


async def respond(
    request: Request, service: Service, call: Call, of_prompts: list[list[engine_request.Request]], form: Form
) -> Response:
    """Serves requests, and words what comes of them."""
    if call.streamed:
        return EventStream(_events(service, call, of_prompts, form), service.options.slow_client_seconds)
    content = await while_connected(request.receive, _whole(service, call, of_prompts, form))
    return Response(as_json(content), media_type="application/json")


async def _whole(
    service: Service, call: Call, of_prompts: list[list[engine_request.Request]], form: Form
) -> dict[str, Any]:
    async with service.serve(of_prompts) as stream:
        deltas = [_wanted(delta, call) async for delta in stream.all()]
        usage = _usage(stream, sum(len(delta.token_ids) for delta in deltas))
    outputs = gather([of_prompt[0].prompt for of_prompt in of_prompts], deltas)
    return _frame(call, form.whole) | form.answer(outputs) | {"usage": usage}


async def _events(
    service: Service, call: Call, of_prompts: list[list[engine_request.Request]], form: Form
) -> AsyncGenerator[bytes]:
    frame, num_tokens = _frame(call, form.chunk), 0
    async with service.serve(of_prompts) as stream:
        while (deltas := await stream.next(service.options.keep_alive_seconds)) != []:
            if deltas is None:
                yield KEEP_ALIVE
                continue
            for delta in merged(_wanted(delta, call) for delta in deltas):
                num_tokens += len(delta.token_ids)
                for choice in form.chunks(delta):
                    usage = {"usage": _usage(stream, num_tokens)} if call.continuous_usage else {}
                    yield event(frame | {"choices": [choice]} | usage)
        if call.include_usage:
            yield event(frame | {"choices": [], "usage": _usage(stream, num_tokens)})


def _wanted(delta: Delta, call: Call) -> Delta:
    if not call.computes_no_token:
        return delta
    logprobs = None if delta.logprobs is None else ()
    return dataclasses.replace(delta, text="", token_ids=(), logprobs=logprobs, finish_reason="length")


def _frame(call: Call, kind: str) -> dict[str, Any]:
    return {"id": call.id, "object": kind, "created": call.created, "model": call.model}


def _usage(stream: OutputStream, num_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": stream.prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": stream.prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": stream.cached_tokens},
    }


def make_requests(
    service: Service, prompts: Sequence[Any], params: Any, cache_salt: str | None
) -> list[list[engine_request.Request]]:
    """Requests of token ids, which share what is computed with others of the same salt alone.

    Raises:
        ValueError: One cannot be served.
    """
    if params.n * len(prompts) > service.options.max_queued + service.llm.engine.config.max_num_seqs:
        raise ApiError(400, f"A request must have fewer sequences. Got {params.n * len(prompts)}.")
    salt = {} if cache_salt is None else {"cache_salt": cache_salt}
    return service.llm.intake.make_requests([{"prompt_token_ids": prompt} | salt for prompt in prompts], params)
