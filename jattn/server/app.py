"""The ASGI application: which path is served by what."""

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from jattn.server import state_routes, token_routes
from jattn.server.api_key import ApiKeyGuard
from jattn.server.chat import chat_completions
from jattn.server.compile_events import heard_compilations
from jattn.server.completions import completions
from jattn.server.errors import ApiError, on_api_error, on_bug, on_client_gone, on_http_error
from jattn.server.page import page
from jattn.server.service import Service

_STOP_SECONDS = 10.0  # for the step under way

_ROUTES = [
    Route("/", page),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/models", state_routes.models),
    Route("/v1/models/{name:path}", state_routes.model),
    Route("/tokenize", token_routes.tokenize, methods=["POST"]),
    Route("/detokenize", token_routes.detokenize, methods=["POST"]),
    Route("/tokenizer_info", token_routes.tokenizer_info),
    Route("/health", state_routes.health),
    Route("/ping", state_routes.health, methods=["GET", "POST"]),
    Route("/version", state_routes.server_version),
    Route("/metrics", state_routes.metrics),
    Route("/reset_prefix_cache", state_routes.reset_prefix_cache, methods=["POST"]),
]


def make_app(service: Service) -> Starlette:
    """An application over a service, which begins with it and ends with it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with heard_compilations(service.metrics.compiled.inc):
            service.start()
            yield
            service.thread.stop(_STOP_SECONDS)

    app = Starlette(
        routes=_ROUTES,
        middleware=[Middleware(ApiKeyGuard, keys=service.options.api_keys)],
        exception_handlers={
            ApiError: on_api_error,
            HTTPException: on_http_error,
            ClientDisconnect: on_client_gone,
            Exception: on_bug,
        },
        lifespan=lifespan,
    )
    app.state.service = service
    return app
