"""The thread that owns an engine: what it tells, that a step which fails loses nothing, and when it gives up."""

import threading

import pytest

from jattn.serving.engine_thread import EngineThread
from tests.jattn.harness.tiny import run, sampled, tiny_engine

PROMPTS = [([7, 8, 9, 10], 9), (list(range(100, 140)), 4), ([5], 12)]


class Heard:
    """What a thread delivers, by request."""

    def __init__(self):
        self.counts, self.ends, self.started = {}, {}, []
        self._changed = threading.Condition()

    def __call__(self, report):
        with self._changed:
            for progress in report.progress:
                assert progress.request not in self.ends
                self.counts.setdefault(progress.request, []).append(progress.num_tokens)
                if progress.finish_reason:
                    self.ends[progress.request] = progress
            self.started += report.started
            self._changed.notify_all()

    def wait(self, enough):
        with self._changed:
            assert self._changed.wait_for(lambda: enough(self), timeout=60)


@pytest.fixture
def served():
    """A thread over the shared engine, and what it is heard to say."""
    heard = Heard()
    engine = tiny_engine()
    thread = EngineThread(engine, heard)
    thread.start()
    yield engine, thread, heard
    assert thread.stop(timeout=60.0)
    assert not engine.has_work
    assert engine.kv_cache.num_free == engine.kv_cache.num_pages


def requests_of(engine):
    return [engine.make_request(prompt, sampled(seed=n, max_tokens=n)) for prompt, n in PROMPTS]


def tokens_alone():
    engine = tiny_engine()
    return [list(tokens) for tokens in run(engine, requests_of(engine))]


def test_all_tokens_are_told_in_order_and_once():
    expected = tokens_alone()
    heard = Heard()
    engine = tiny_engine()
    thread = EngineThread(engine, heard)
    thread.start()
    requests = requests_of(engine)
    thread.add(requests)
    heard.wait(lambda heard: len(heard.ends) == 3)
    assert thread.stop(timeout=60.0)
    assert [request.generated for request in requests] == expected
    assert heard.started == requests
    for request, (_, n) in zip(requests, PROMPTS, strict=True):
        assert heard.counts[request] == sorted(set(heard.counts[request]))
        assert heard.ends[request].num_tokens == n
        assert heard.ends[request].finish_reason == "length"


def test_aborted_requests_free_their_pages_and_are_told_no_more(served):
    engine, thread, heard = served
    stays, goes = (engine.make_request(prompt, sampled(seed=1, max_tokens=20)) for prompt in ([7, 8], [9]))
    thread.add([stays, goes])
    heard.wait(lambda heard: len(heard.counts) == 2)
    thread.abort([goes])
    heard.wait(lambda heard: stays in heard.ends)
    assert goes not in heard.ends
    assert goes.finish_reason == "abort"
    assert thread.count() == (0, 0)


def test_calls_run_between_steps_and_bring_back_what_they_raise(served):
    engine, thread, _ = served
    assert thread.call(lambda engine: (engine, threading.current_thread().name)).result(60) == (engine, "jattn-engine")
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda engine: 1 // 0).result(60)


@pytest.mark.parametrize("call", [1, 3, 6])
def test_a_step_that_fails_loses_no_token(served, monkeypatch, call):
    """The launch itself has run when it fails, so that state and pool are consumed."""
    expected = tokens_alone()
    engine, thread, heard = served
    steps, calls = engine.executor.compiled_steps, []

    def failing(*arguments):
        calls.append(None)
        given = steps(*arguments)
        if len(calls) == call:
            raise RuntimeError("planted")
        return given

    monkeypatch.setattr(engine.executor, "compiled_steps", failing)
    requests = requests_of(engine)
    thread.add(requests)
    heard.wait(lambda heard: len(heard.ends) == 3)
    assert len(calls) > call
    assert [request.generated for request in requests] == expected
    assert thread.death is None


def test_three_failures_in_a_row_end_all_with_a_sentence(served, monkeypatch):
    engine, thread, heard = served

    def failing(*arguments):
        raise RuntimeError("the device\nis lost")

    monkeypatch.setattr(engine.executor, "compiled_steps", failing)
    first, second, late = requests_of(engine)
    thread.add([first, second])
    heard.wait(lambda heard: len(heard.ends) == 2)
    thread.add([late])
    heard.wait(lambda heard: len(heard.ends) == 3)
    sentence = "The engine has stopped after 3 failed steps in a row: the device is lost"
    assert {(end.finish_reason, end.error) for end in heard.ends.values()} == {("error", sentence)}
    assert thread.death == sentence
    monkeypatch.undo()
    for request in (first, second):  # the shared engine is left idle
        engine.abort(request)
