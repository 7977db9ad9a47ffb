"""Answers of both completion endpoints: what they have in common, streamed or whole."""

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from starlette.requests import Request
from starlette.responses import Response

from jattn.server.bodies import flag, read_object, shortened, typed
from jattn.server.errors import ApiError
from jattn.server.event_stream import KEEP_ALIVE, EventStream, EventWriter, as_json, while_connected
from jattn.server.offload import LONG, offloaded
from jattn.server.output_stream import OutputStream, merged
from jattn.server.sampling_fields import sampling_params
from jattn.server.service import Service
from jattn.server.structured_fields import asks_for_structure
from jattn.serving import request as engine_request
from jattn.serving.frontend.outputs import Delta, RequestOutput, gather
from jattn.serving.sampling_params import SamplingParams


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
        options = {name: value for name, value in options.items() if value is not None}
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


@runtime_checkable
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


Asked = tuple[Call, Form, list[list[engine_request.Request]]]


async def respond(request: Request, read: Callable[[Service, Request, dict[str, Any]], Asked]) -> Response:
    """Serves what a body asks for, and words what comes of it.

    Args:
        read: What the endpoint makes of a body.
    """
    service: Service = request.app.state.service
    body, num_bytes = await read_object(request, service.options.max_body_bytes)
    service.check_serving()
    takes_long = num_bytes > LONG or asks_for_structure(body)
    call, form, of_prompts = await offloaded(takes_long, read, service, request, body)
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
    writer, num_tokens = EventWriter(_frame(call, form.chunk)), 0
    async with service.serve(of_prompts) as stream:
        while (deltas := await stream.next(service.options.keep_alive_seconds)) != []:
            if deltas is None:
                yield KEEP_ALIVE
                continue
            for delta in merged(_wanted(delta, call) for delta in deltas):
                num_tokens += len(delta.token_ids)
                for choice in form.chunks(delta):
                    usage = {"usage": _usage(stream, num_tokens)} if call.continuous_usage else {}
                    yield writer.event({"choices": [choice]} | usage)
        if call.include_usage:
            yield writer.event({"choices": [], "usage": _usage(stream, num_tokens)})


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


def read_params(
    service: Service, call: Call, body: dict[str, Any], *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """How a body says to sample.

    Raises:
        ValueError: It cannot be done, or not streamed.
    """
    params = sampling_params(body, service.llm.intake.default_params, max_tokens=max_tokens, logprobs=logprobs)
    if params.prompt_logprobs is not None and call.streamed:
        raise ValueError("`prompt_logprobs` cannot be streamed: leave out `stream`.")
    return params


def make_requests(
    service: Service,
    body: dict[str, Any],
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    grammar_after: int | None = None,
) -> list[list[engine_request.Request]]:
    """Requests of token ids, which share what is computed with others of the body's `cache_salt` alone.

    Args:
        grammar_after: As for `Intake.make_requests`.

    Raises:
        ValueError: One cannot be served.
    """
    if params.n * len(prompts) > service.options.max_queued + service.llm.engine.config.max_num_seqs:
        raise ApiError(400, f"A request must have fewer sequences. Got {params.n * len(prompts)}.")
    cache_salt = typed(body, "cache_salt", str, "a text")
    salt = {} if cache_salt is None else {"cache_salt": cache_salt}
    salted = [{"prompt_token_ids": prompt} | salt for prompt in prompts]
    return service.llm.intake.make_requests(salted, params, grammar_after=grammar_after)
