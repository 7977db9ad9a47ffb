"""The guard at the door: an API key on every route but the page, and those that tell of health alone."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jattn.server.errors import ApiError

OPEN = ("/", "/health", "/ping", "/version", "/metrics")  # browsers and probes bring no key; these hold no text


class ApiKeyGuard:
    """Lets requests pass that bring one of the keys (`Authorization: Bearer KEY`); all do where there are none."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"] not in OPEN:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            given = _digest(key.strip())
            fitting = [hmac.compare_digest(given, digest) for digest in self._digests]
            if scheme.lower() != "bearer" or not any(fitting):
                error = ApiError(401, "The API key is missing or wrong: send `Authorization: Bearer KEY`.")
                return await error.response()(scope, receive, send)
        return await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
