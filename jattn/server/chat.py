"""`POST /v1/chat/completions`: the assistant's answer to a conversation."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jattn.server.answers import Asked, Call, make_requests, read_params, respond
from jattn.server.bodies import flag, typed
from jattn.server.channels import Channels
from jattn.server.chat_form import ChatForm
from jattn.server.chat_prompt import chat_text, encoded
from jattn.server.errors import refusals
from jattn.server.sampling_fields import refuse_unserved
from jattn.server.service import Service
from jattn.server.thinking import Thinking
from jattn.server.tools.asked import asked_tools
from jattn.server.tools.message import Message


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
        includes_reasoning = flag(body, "include_reasoning", True)
        options = service.options
        tools = asked_tools(body, options.tool_call_parser, is_auto_enabled=options.enable_auto_tool_choice)
        params = tools.params_of(read_params(service, call, body, max_tokens=most, logprobs=asked))
        text, has_form = chat_text(service, body), params.structured_outputs is not None
        channels = Channels.of(service, text, has_form=has_form)
        thinking = Thinking.of(service, text, has_form=has_form)
        params, ids = channels.params_of(params), encoded(service, body, text + channels.opening)
        of_prompts = make_requests(service, body, [ids], params, grammar_after=thinking.end_token)

    def new_message() -> Message:
        return Message(
            channels.parser_over(thinking.parser_over(tools.make_parser())),
            is_parallel=tools.is_parallel,
            short_ids=tools.short_ids,
            includes_reasoning=includes_reasoning,
        )

    gives_prompt_logprobs = params.prompt_logprobs is not None
    tokenizer = service.llm.tokenizer
    form = ChatForm(
        call, new_message, tokenizer, prompt=ids, logprobs=asked, gives_prompt_logprobs=gives_prompt_logprobs
    )
    return call, form, of_prompts
