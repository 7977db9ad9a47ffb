"""Answers while a client listens: server-sent events, and the end of the work when the client goes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jattn.server.errors import ApiError
from jattn.server.overdue import Overdue

KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy is not to hold events back
]


class ClientGone(ClientDisconnect):
    """Nobody waits for the answer any more."""


_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def as_json(content: Any) -> bytes:
    return _written(content).encode("utf-8", "replace")  # a client's own words may hold half of a surrogate pair


def event(content: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + as_json(content) + b"\n\n"


class EventWriter:
    """Writes events that begin alike, without writing that part again each time.

    Args:
        frame: The fields that they begin with; not empty.
    """

    def __init__(self, frame: dict[str, Any]):
        self._begin = b"data: " + as_json(frame)[:-1] + b","

    def event(self, fields: dict[str, Any]) -> bytes:
        """The event of the frame and some fields more, of other names."""
        return self._begin + as_json(fields)[1:] + b"\n\n"


async def while_connected[Result](receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Does the work, of which nothing goes on once the client has gone.

    Args:
        receive: ASGI's, after the request's body.

    Raises:
        ClientGone: It has.
    """
    doing, going = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((doing, going), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        return doing.result()
    finally:
        for task in (doing, going):
            task.cancel()
        await asyncio.gather(doing, going, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events, ended by `[DONE]`.

    It begins with the first event: an error before that is a response of its own, one after it is an event.

    Args:
        events: Gives events as bytes; closed when the client goes.
        slow_client_seconds: A client that takes nothing for so long is gone.
    """

    def __init__(self, events: AsyncGenerator[bytes], slow_client_seconds: float):
        super().__init__()
        self._events = events
        self._slow_client_seconds = slow_client_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await while_connected(receive, self._send_all(scope, receive, send))

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        slow = Overdue(self._slow_client_seconds, task.cancel)
        try:
            await self._send_while_taken(scope, receive, send, slow)
        except asyncio.CancelledError:
            if not slow.acted:
                raise
            task.uncancel()
            raise ClientGone from None
        finally:
            slow.close()

    async def _send_while_taken(self, scope: Scope, receive: Receive, send: Send, slow: Overdue) -> None:
        begun = False
        async with contextlib.aclosing(self._events) as events:
            try:
                async for content in events:
                    if not begun:
                        begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    await self._send(send, content, slow)
            except ApiError as error:
                if not begun:
                    await error.response()(scope, receive, send)
                    return
                await self._send(send, event(error.content), slow)
            await self._send(send, _DONE, slow)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, content: bytes, slow: Overdue) -> None:
        slow.begin()
        await send({"type": "http.response.body", "body": content, "more_body": True})
        slow.end()
