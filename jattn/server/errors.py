"""Errors as clients get them: vLLM's JSON and status codes, each with a sentence."""

import contextlib
from collections.abc import Iterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestEntityTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """What an answer is refused with, or ends with.

    Args:
        status: HTTP's code.
        message: A sentence.
        param: The field that it is about.
        retry_after: Seconds after which a client may ask again.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after = retry_after

    @property
    def content(self) -> dict[str, Any]:
        """The JSON of a response's body, or of the last event of a stream."""
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.content, self.status, headers)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Around what reads a client's wishes: what it finds wrong with them is a 400."""
    try:
        yield
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    except RecursionError as error:
        raise ApiError(400, "The body must not be nested so deep.") from error


async def on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response()


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Of routes that are not there, and methods that they do not take."""
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}.").response()


async def on_client_gone(request: Request, error: Exception) -> Response:
    """To nobody: the client went before its request was whole, or before its answer was."""
    return Response(status_code=499)


async def on_bug(request: Request, error: Exception) -> JSONResponse:
    """The traceback is in the log."""
    return ApiError(500, "The server has made an error; its log says which.").response()
