"""A client of streamed completions that costs little: some 10 us an event, so that it is not what is measured."""

import asyncio
import contextlib
import json
import time
import urllib.parse
from typing import Any

import httptools

_ENDED = "The server has closed the connection amid an answer."


class Answer:
    """What came of a request.

    Attributes:
        sent: When it was begun, connecting included; on the clock of `time.perf_counter`, in seconds.
        times: When each event with tokens came.
        num_tokens: Of the answer, as the server counts them; the number of events if it does not.
        error: Why it failed, in a sentence; None if it did not.
    """

    def __init__(self):
        self.sent = time.perf_counter()
        self.times: list[float] = []
        self.num_tokens = 0
        self.error: str | None = None


class _Connection(asyncio.Protocol):
    """One request at a time; httptools calls the `on_` methods while it parses."""

    def __init__(self):
        self._transport: Any = None
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    async def ask(self, request: bytes, answer: Answer) -> bytes:
        """Sends a request and takes its answer.

        Returns:
            The last event of a stream, or the body of anything else.
        """
        self._answer, self._rest, self._last, self._is_stream = answer, b"", b"", False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        return self._last if self._is_stream else self._rest

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, AttributeError) as error:
            self._finish(f"The server's answer is no HTTP: {error}.")

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(_ENDED if exc is None else f"{_ENDED[:-1]}: {exc}.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream") and self._parser.get_status_code() == 200

    def on_body(self, body: bytes) -> None:
        self._rest += body
        if not self._is_stream:
            return
        if b"\r" in body:
            self._rest = self._rest.replace(b"\r\n", b"\n")
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:") and event[5:].strip() != b"[DONE]":
                self._answer.times.append(self._now)
                self._last = event[5:]

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        self._finish(None if status == 200 else f"Status {status}: {_told(self._rest)}")

    def _finish(self, error: str | None) -> None:
        if self._done is not None and not self._done.done():
            self._answer.error = error
            self._done.set_result(None)


class Client:
    """Asks one server, over connections that are kept.

    Args:
        url: Where it listens, as "http://127.0.0.1:8000"; a path such as "/v1" at its end is left out.
        api_key: Sent with each request, if any.

    Raises:
        ValueError: `url` is none.
    """

    def __init__(self, url: str, api_key: str | None = None):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"`url` must be as http://127.0.0.1:8000. Got {url!r}.")
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\n{key}"
        self._idle: list[_Connection] = []

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        """The bytes of a request, so that they may be made before its time."""
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        head = f"{method} {self._root}{path} HTTP/1.1\r\n{self._headers}Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    def completion(self, model: str, prompt: list[int], num_tokens: int) -> bytes:
        """The request of an answer of exactly so many tokens, streamed."""
        body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return self.request("POST", "/v1/completions", body | stream)

    async def stream(self, request: bytes) -> Answer:
        """What comes of a completion's request; a failure is told in the answer."""
        answer = Answer()
        last = await self._ask(request, answer)
        if answer.error is None:
            _read_last(answer, last)
        return answer

    async def get(self, path: str) -> Any:
        """The JSON at a path.

        Raises:
            ValueError: There is none.
        """
        answer = Answer()
        content = await self._ask(self.request("GET", path), answer)
        if answer.error is None:
            with contextlib.suppress(ValueError):
                return json.loads(content)
        raise ValueError(f"The server must answer GET {path} with JSON. {answer.error or _told(content)}")

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _ask(self, request: bytes, answer: Answer) -> bytes:
        try:
            connection = await self._connection()
        except OSError as error:
            answer.error = f"No connection to {self._host}:{self._port}: {error.strerror or error}."
            return b""
        content = await connection.ask(request, answer)
        if connection.is_open:
            self._idle.append(connection)
        return content

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        tls = True if self._tls else None
        _, made = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port, ssl=tls)
        return made


def _read_last(answer: Answer, last: bytes) -> None:
    """Reads the count of tokens off a stream's last event, which has no other if the server counts at all."""
    try:
        content = json.loads(last)
        usage, choices, error = content.get("usage"), content.get("choices"), content.get("error")
    except (ValueError, AttributeError):
        answer.error = f"The server's answer must end with an event of JSON. Got {_told(last)}"
        return
    if error is not None:
        answer.error = _told(last)
        return
    if not choices:
        answer.times.pop()
    answer.num_tokens = usage["completion_tokens"] if usage else len(answer.times)
    if not answer.times:
        answer.error = "The server's answer has no token."


def _told(content: bytes) -> str:
    """What a server says of an error, cut short."""
    text = content.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return text[:300] or "nothing."
