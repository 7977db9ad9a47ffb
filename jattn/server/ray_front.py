"""A front before the replicas on Ray Serve: requests that begin alike go to the same one. Needs the extra `ray`.

    client -> Ray's proxy -> Front, whose PrefixRouter chooses by the body -> `answer` of a ReplicaBehind

Ray's proxy chooses an application's replica before it has a body, so no router of it could. What a replica had is what
was sent to it from here: a front that begins anew knows nothing, and replicas forget what they have no room for.
"""

import asyncio
import collections
import dataclasses
import importlib
import json
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from jattn.server.ray import Replica

_BLOCK = 128  # characters: few pages of the KV pool
_MOST_BLOCKS_OF_A_BODY = 1024
_MOST_BLOCKS = 2**17
_MORE_REQUESTS = 16  # than the replica with the fewest has: then the others may do as well
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path"),
    *("root_path", "query_string", "headers", "client", "server"),
)

_RequestRouter: Any = importlib.import_module("ray.serve.request_router").RequestRouter


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request on its way to a replica.

    Attributes:
        scope: ASGI's, as far as it can be sent.
        body: All of it; of one that is too long as much as shows that.
        blocks: Of what it begins with, as of `blocks_of`.
    """

    scope: dict[str, Any]
    body: bytes
    blocks: tuple[int, ...]


def blocks_of(body: bytes) -> tuple[int, ...]:
    """A number for each whole block of what a body asks about; bodies that begin alike begin with the same numbers.

    They mean something in this process alone, and there are none in a body that asks for no text.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    said = (content.get("messages") or content.get("prompt")) if isinstance(content, dict) else None
    if not said:
        return ()
    text, found = json.dumps([content.get("cache_salt"), content.get("tools"), said]), [0]
    for end in range(_BLOCK, min(len(text), _BLOCK * _MOST_BLOCKS_OF_A_BODY) + 1, _BLOCK):
        found.append(hash((found[-1], text[end - _BLOCK : end])))
    return tuple(found[1:])


class PrefixRouter(_RequestRouter):
    """Chooses replicas that were sent the most of what a request begins with, unless they have far more to do."""

    def initialize_state(self) -> None:
        self._had: collections.OrderedDict[int, set[Any]] = collections.OrderedDict()

    async def choose_replicas(self, candidate_replicas: Sequence[Any], pending_request: Any = None) -> list[list[Any]]:
        """Two lists of replicas; of the first that has any Ray takes the one with the fewest requests."""
        if pending_request is None:
            return [list(candidate_replicas)]
        pending_request.routing_context.should_backoff = True  # once all were tried
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        best = self._best(set(replicas), pending_request.args[0].blocks)
        number = {each: self.replica_queue_len_cache.get(each) or 0 for each in replicas}
        if min(map(number.__getitem__, best)) - min(number.values()) > _MORE_REQUESTS:
            best = set(replicas)
        order = random.sample(list(replicas), len(replicas))  # Ray takes the first of several with as few
        return [[replicas[each] for each in order if (each in best) is wanted] for wanted in (True, False)]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        for block in reversed(pending_request.args[0].blocks):  # what is forgotten first is a text's end
            self._had.setdefault(block, set()).add(replica_id)
            self._had.move_to_end(block)
        while len(self._had) > _MOST_BLOCKS:
            self._had.popitem(last=False)

    def _best(self, replicas: set[Any], blocks: Iterable[int]) -> set[Any]:
        for block in blocks:
            fewer = replicas & self._had.get(block, set())
            if not fewer:
                break
            replicas = fewer
        return replicas


class ReplicaBehind(Replica):
    """A replica that Ray brings whole requests in place of ASGI's."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._app = self.__serve_build_asgi_app__()
        self._lifespan: Any = None
        self._starting = asyncio.Lock()

    async def answer(self, asked: Asked) -> AsyncIterator[Message]:
        """ASGI's messages that answer a request; where nobody takes them any more, the work for it ends."""
        async with self._starting:
            if self._lifespan is None:
                lifespan = self._app.router.lifespan_context(self._app)
                await lifespan.__aenter__()
                self._lifespan = lifespan
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        received = iter([{"type": "http.request", "body": asked.body, "more_body": False}])

        async def receive() -> Message:
            return next(received, None) or await asyncio.get_running_loop().create_future()

        answering = asyncio.ensure_future(self._app(asked.scope, receive, messages.put))
        answering.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)


class Front:
    """Passes requests on to replicas, and what they answer back.

    Args:
        replicas: Ray's handle of their deployment.
        most_body_bytes: A replica refuses longer bodies.
    """

    def __init__(self, replicas: Any, most_body_bytes: int):
        self._replicas = replicas.options(stream=True).answer
        self._most_body_bytes = most_body_bytes

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Mount("/", self._serve)])

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more and len(body) <= self._most_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        asked = Asked({name: scope[name] for name in _SCOPE if name in scope}, body, blocks_of(body))
        answers = self._replicas.remote(asked)
        try:
            async for message in answers:
                await send(message)
        finally:
            answers.cancel()  # the client may have gone
