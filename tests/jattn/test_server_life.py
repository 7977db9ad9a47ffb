"""What a server lives through: clients that go, too many of them, steps that fail or hang; and how it ends."""

import asyncio
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.server import app as app_module
from jattn.server.api_key import OPEN, ApiKeyGuard
from jattn.server.errors import ApiError
from jattn.server.event_stream import EventStream, EventWriter, event
from jattn.serving.request import Request
from tests.jattn.harness.http_server import CHAT, GREEDY
from tests.jattn.test_server_completions import assembled, whole

LONG = {**GREEDY, "max_tokens": 200}
COMPLETIONS, CHAT_PATH = "/v1/completions", "/v1/chat/completions"


@contextlib.contextmanager
def begun(server, body):
    """A stream of which the first event has come."""
    with server.response("POST", COMPLETIONS, body | {"stream": True}) as response:
        assert response.status == 200
        first = response.readline()
        assert first.startswith(b"data: {")
        yield response


def last_event(response):
    """The last event of a stream that has begun, but for the one that ends all streams."""
    *_, last, done, rest = response.read().decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return json.loads(last.strip().removeprefix("data: "))  # what ends the first line may come with it


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_takes_its_requests_with_it(http_server, slow_steps, streamed):
    if streamed:
        with begun(http_server, LONG):
            (request,) = http_server.service._streams
    else:
        with http_server.asked("POST", COMPLETIONS, LONG):
            while not (streams := list(http_server.service._streams)) or not streams[0].generated:
                time.sleep(0.01)
            (request,) = streams
    http_server.wait_until_idle()
    assert request.finish_reason == "abort"
    assert len(request.generated) < 60


def test_a_client_that_goes_amid_its_request_is_no_error(http_server, caplog):
    with http_server.asked("POST", COMPLETIONS, b"{", {"Content-Length": "1000"}):
        while not http_server.server.server_state.tasks:
            time.sleep(0.01)
    while http_server.server.server_state.tasks:
        time.sleep(0.01)
    assert not caplog.records


def test_a_client_that_takes_nothing_is_cut_off():
    closed = []

    async def events():
        try:
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"
        finally:
            closed.append(True)

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        if message.get("body") == b"data: 2\n\n":
            await asyncio.Event().wait()

    begin = time.perf_counter()
    asyncio.run(EventStream(events(), 0.05)({}, receive, send))
    assert closed == [True]
    assert time.perf_counter() - begin < 5


def test_a_stream_that_waits_long_is_kept_alive(http_server, slow_steps, monkeypatch):
    options = dataclasses.replace(http_server.service.options, keep_alive_seconds=0.001)
    monkeypatch.setattr(http_server.service, "options", options)
    with http_server.response("POST", COMPLETIONS, GREEDY | {"stream": True}) as response:
        content = response.read()
    assert content.startswith(b": keep-alive\n\n")
    monkeypatch.undo()
    events = content.replace(b": keep-alive\n\n", b"").split(b"\n\n")
    expected = whole(http_server.post(COMPLETIONS, GREEDY))
    assert assembled(json.loads(event.removeprefix(b"data: ")) for event in events[:-2]) == expected


def test_more_than_may_wait_are_told_to_come_again(http_server, slow_steps, monkeypatch):
    options = dataclasses.replace(http_server.service.options, max_queued=0)
    monkeypatch.setattr(http_server.service, "options", options)
    with begun(http_server, LONG | {"n": 4}):
        for body in (GREEDY, GREEDY | {"stream": True}):
            status, headers, content = http_server.call("POST", COMPLETIONS, body)
            assert (status, headers["retry-after"]) == (503, "5")
            assert content["error"]["message"].startswith("At most 4 sequences are served or wait at once, and 4 are.")
    http_server.wait_until_idle()
    status, _, content = http_server.call("POST", COMPLETIONS, GREEDY | {"n": 5})
    assert (status, content["error"]["message"]) == (400, "A request must have fewer sequences. Got 5.")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_body_has_its_limit(http_server, monkeypatch, path, chunked):
    options = dataclasses.replace(http_server.service.options, max_body_bytes=1000)
    monkeypatch.setattr(http_server.service, "options", options)
    body = json.dumps({"prompt": "x" * 2000}).encode()
    status, _, content = http_server.call("POST", path, iter([body]) if chunked else body)
    assert (status, content["error"]["code"]) == (413, 413)
    assert content["error"]["message"] == "The body of a request must have at most 1000 bytes. Got more."


@pytest.mark.parametrize(
    ("path", "given", "passes"),
    [
        ("/v1/models", "Bearer one", True),
        ("/v1/models", "bearer two", True),
        ("/v1/models", "Bearer three", False),
        ("/v1/models", "Basic one", False),
        ("/v1/models", "one", False),
        ("/v1/models", None, False),
        ("/tokenize", None, False),
        ("/reset_prefix_cache", None, False),
        *[(path, None, True) for path in OPEN],
    ],
)
def test_an_api_key_guards_all_but_health(path, given, passes):
    passed, sent = [], []

    async def app(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        sent.append(message)

    headers = [] if given is None else [(b"authorization", given.encode())]
    asyncio.run(ApiKeyGuard(app, ["one", "two"])({"type": "http", "path": path, "headers": headers}, None, send))
    assert bool(passed) == passes
    if not passes:
        assert sent[0]["status"] == 401
        assert json.loads(sent[1]["body"])["error"]["type"] == "AuthenticationError"


def test_a_step_that_fails_changes_no_answer(http_server, monkeypatch):
    expected = [whole(http_server.post(path, body)) for path, body in ((COMPLETIONS, GREEDY), (CHAT_PATH, CHAT))]
    executor = http_server.service.llm.engine.executor
    steps, calls = executor.compiled_steps, []

    def failing(*arguments):
        calls.append(None)
        given = steps(*arguments)
        if len(calls) in (2, 9):
            raise RuntimeError("planted")
        return given

    monkeypatch.setattr(executor, "compiled_steps", failing)
    found = [None, None]

    def ask(i, path, body):
        found[i] = assembled(http_server.events(path, body))

    asking = [
        threading.Thread(target=ask, args=arguments) for arguments in ((0, COMPLETIONS, GREEDY), (1, CHAT_PATH, CHAT))
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(60)
    assert found == expected
    assert len(calls) > 9


def test_logits_that_are_not_finite_are_a_server_error(http_server, monkeypatch):
    executor = http_server.service.llm.engine.executor
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), executor.weights)
    monkeypatch.setattr(executor, "weights", broken)
    for body in (GREEDY, GREEDY | {"stream": True}):
        status, _, content = http_server.call("POST", COMPLETIONS, body)
        assert status == 500
        assert content["error"]["message"].startswith("The model's logits after 4 tokens are NaN or infinite")
    monkeypatch.undo()
    http_server.post(COMPLETIONS, GREEDY)


def test_an_engine_that_cannot_go_on_ends_the_server(second_server, monkeypatch):
    server = second_server()
    executor = server.service.llm.engine.executor

    with begun(server, LONG) as response:
        (request,) = server.service._streams

        def failing(*arguments):
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(executor, "compiled_steps", failing)
        error = last_event(response)["error"]
    server.join()
    sentence = "The engine has stopped after 3 failed steps in a row: the device is lost"
    assert (error["code"], error["message"]) == (500, sentence)
    assert server.service.thread.death == sentence
    with pytest.raises(ApiError, match="The engine has stopped"):
        server.service.check_serving()
    monkeypatch.undo()
    server.service.llm.engine.abort(request)  # the engine itself goes on


def test_a_step_that_hangs_ends_the_server(second_server, monkeypatch):
    monkeypatch.setattr(app_module, "_STOP_SECONDS", 0.1)
    dumped, released = [], threading.Event()
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda: dumped.append(True))
    server = second_server(watchdog_seconds=0.3)
    engine = server.service.llm.engine
    step = engine.step
    with begun(server, LONG) as response:
        (request,) = server.service._streams
        monkeypatch.setattr(engine, "step", lambda: released.wait(60) and step())
        error = last_event(response)["error"]
    server.join()
    assert server.service.thread.is_running
    assert error["message"] == "A step of the engine has not ended in 0.3 s."
    assert dumped
    released.set()
    assert server.service.thread.stop(60.0)
    monkeypatch.undo()
    engine.abort(request)


def test_the_first_signal_lets_requests_end(second_server, slow_steps):
    server = second_server(drain_seconds=60.0)
    (expected,) = whole(server.post(COMPLETIONS, LONG | {"max_tokens": 30}))
    with begun(server, LONG | {"max_tokens": 30}) as response:
        server.server.handle_exit(signal.SIGTERM, None)
        for path, body in (("/health", None), (COMPLETIONS, GREEDY)):
            status, _, content = server.call("POST" if body else "GET", path, body)
            assert (status, content["error"]["message"]) == (503, "The server is shutting down.")
        events = response.read().decode().split("\n\n")
    server.join()
    rest = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    ((text, *end),) = assembled(rest)
    assert expected[0].endswith(text)
    assert (*end,) == expected[1:]
    assert server.service.thread.death is None


def test_requests_that_take_longer_than_draining_end_with_an_error(second_server, slow_steps):
    server = second_server(drain_seconds=0.1)
    with server.asked("POST", COMPLETIONS, LONG) as whole_answer, begun(server, LONG) as response:
        server.server.handle_exit(signal.SIGTERM, None)
        assert last_event(response)["error"]["message"] == "The server is shutting down."
        refused = whole_answer.getresponse()
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
    server.join()


def test_the_second_signal_waits_for_nobody(second_server, slow_steps):
    server = second_server(drain_seconds=60.0)
    with begun(server, LONG) as response:
        server.server.handle_exit(signal.SIGINT, None)
        assert not server.server.should_exit
        server.server.handle_exit(signal.SIGINT, None)
        assert last_event(response)["error"]["message"] == "The server is shutting down."
    server.join()


def held():
    """What the process has: memory in MiB, open files, objects, and those of them that are requests."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free within the process is not held
    pages, objects = int(Path("/proc/self/statm").read_text().split()[1]), gc.get_objects()
    requests = sum(isinstance(thing, Request) for thing in objects)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd")), len(objects), requests


@pytest.mark.slow
def test_a_thousand_streams_dropped_at_random_leave_nothing(http_server):
    """Eight clients at once, each of which leaves before its answer begins, or after some events."""
    threads, random = set(threading.enumerate()), np.random.default_rng(0)

    def drop(count, seconds):
        with http_server.asked("POST", COMPLETIONS, LONG | {"stream": True, "n": 1 + count % 3}) as connection:
            time.sleep(seconds)
            if count:
                with connection.getresponse() as response:
                    for _ in range(2 * count):
                        response.readline()

    with ThreadPoolExecutor(8) as pool:
        found = []
        for _ in range(10):
            list(pool.map(drop, random.integers(0, 12, 100).tolist(), random.uniform(0, 0.02, 100).tolist()))
            http_server.wait_until_idle()
            found.append(held())
    assert set(threading.enumerate()) <= threads
    assert not http_server.service.metrics._times
    memory, files, objects, requests = zip(*found, strict=True)
    assert np.median(memory[5:]) < np.median(memory[:5]) + 8, memory  # 16 KiB a stream; single ones go up and down
    assert max(objects[5:]) < max(objects[:5]) + 500, objects  # one of each stream would be as many
    assert len(set(files)) == 1, files
    assert max(requests) <= 8, requests  # those of the last launches, and no more
    assert whole(http_server.post(COMPLETIONS, GREEDY))


def test_an_event_is_what_its_fields_come_to_in_one():
    frame, fields = {"id": "a\ud800é", "created": 3}, {"choices": [{"text": 'quo"te'}], "usage": None}
    assert EventWriter(frame).event(fields) == event(frame | fields)
