"""Text to tokens and back: `/tokenize`, `/detokenize`, `/tokenizer_info`."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jattn.checkpoint import read_json
from jattn.server.bodies import flag, read_object, shortened, typed
from jattn.server.chat_prompt import chat_tokens
from jattn.server.errors import refusals
from jattn.server.event_stream import as_json
from jattn.server.offload import LONG, offloaded
from jattn.server.service import Service
from jattn.serving.request import token_ids


async def tokenize(request: Request) -> Response:
    """The token ids of `prompt`, or of the conversation `messages`."""
    return await _told(request, _tokenized)


def _tokenized(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    service.model_name(body)
    tokenizer = service.llm.tokenizer
    with refusals():
        if "messages" in body:
            ids = chat_tokens(service, body)
        elif (prompt := typed(body, "prompt", str, "a text")) is not None:
            ids = tokenizer.encode(prompt, add_special_tokens=flag(body, "add_special_tokens", True))
        else:
            raise ValueError("`prompt` or `messages` must be given. Got neither.")
        names = [tokenizer.token(token) for token in ids] if flag(body, "return_token_strs") else None
    most = service.llm.engine.config.max_context_len
    return {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": names}


async def detokenize(request: Request) -> Response:
    """The text of `tokens`."""
    return await _told(request, _detokenized)


def _detokenized(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    service.model_name(body)
    tokenizer = service.llm.tokenizer
    with refusals():
        if "tokens" not in body:
            raise ValueError(f"`tokens` must be given. Got {shortened(sorted(body))}.")
        tokens = token_ids(body["tokens"], "`tokens`", tokenizer.vocab_size)
    return {"prompt": tokenizer.decode(tokens, skip_special_tokens=False)}


async def tokenizer_info(request: Request) -> Response:
    """What the checkpoint's tokenizer_config.json says, special tokens as texts."""
    service: Service = request.app.state.service
    template = service.llm.chat_template
    file = template.folder / "tokenizer_config.json"
    told = read_json(file) if file.is_file() else {}
    return _json({"tokenizer_class": "PreTrainedTokenizerFast"} | told | template.special_tokens)


async def _told(request: Request, tell: Callable[[Service, dict[str, Any]], dict[str, Any]]) -> Response:
    """What `tell` makes of a body."""
    service: Service = request.app.state.service
    body, num_bytes = await read_object(request, service.options.max_body_bytes)
    return _json(await offloaded(num_bytes > LONG, tell, service, body))


def _json(content: dict[str, Any]) -> Response:
    return Response(as_json(content), media_type="application/json")
