"""What the server is and how it is: models, health, version, metrics, and the prefix cache's reset."""

import asyncio
from importlib.metadata import version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jattn.server.errors import ApiError
from jattn.server.service import Service
from jattn.serving.engine import Engine


async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    return JSONResponse({"object": "list", "data": [_card(service, name) for name in service.options.model_names]})


async def model(request: Request) -> Response:
    service: Service = request.app.state.service
    return JSONResponse(_card(service, service.model_name({"model": request.path_params["name"]})))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jattn",
        "root": service.options.model_names[0],
        "parent": None,
        "max_model_len": service.llm.engine.config.max_context_len,
    }


async def health(request: Request) -> Response:
    """200 while requests are served, else 503 with the reason."""
    request.app.state.service.check_serving()
    return Response()


async def server_version(request: Request) -> Response:
    return JSONResponse({"version": version("jattn")})


async def metrics(request: Request) -> Response:
    return Response(request.app.state.service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


async def reset_prefix_cache(request: Request) -> Response:
    """Forgets what the prefix cache has; refused while a request runs (409)."""
    service: Service = request.app.state.service
    if not await asyncio.wrap_future(service.thread.call(Engine.reset_prefix_cache)):
        raise ApiError(409, "The prefix cache cannot be reset while requests run.")
    return Response()
