"""Fixtures of floor 2: the command line's LLM, and calls that only the code under test checks."""

import sys
import time
import types

import jaxtyping
import pytest

import jattn.checkpoint
from jattn.serving.sampling_params import SamplingParams
from tests.jattn.harness.fake_llm import Delta, FakeLLM
from tests.jattn.harness.http_server import PROMPT, HttpServer, bundled_llm


@pytest.fixture
def unchecked(monkeypatch):
    """Annotations are not checked: they would be first to see what is wrong."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def llm(monkeypatch):
    class LLM(FakeLLM):
        deltas = [Delta(0, "one"), Delta(0, " two", "stop")]  # noqa: RUF012
        generation_config = {}  # noqa: RUF012

    module = types.ModuleType("jattn.serving.frontend.llm")
    module.LLM = LLM
    monkeypatch.setitem(sys.modules, "jattn.serving.frontend.llm", module)
    monkeypatch.setattr(
        jattn.checkpoint, "Checkpoint", lambda _: types.SimpleNamespace(generation_config=LLM.generation_config)
    )
    monkeypatch.setattr(jattn.checkpoint, "check_folder", lambda *_: None)
    return LLM


@pytest.fixture(scope="session")
def shared_server():
    server = HttpServer(bundled_llm())
    yield server
    server.stop()


@pytest.fixture
def http_server(shared_server):
    """A server that tests share; each leaves it idle."""
    yield shared_server
    shared_server.wait_until_idle()


@pytest.fixture
def slow_steps(shared_server, monkeypatch):
    """Each step of the engine takes 20 ms more."""
    engine = shared_server.service.llm.engine
    step = engine.step

    def slow():
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(engine, "step", slow)


@pytest.fixture
def second_server(shared_server):
    """Makes a server that may die, over the engine of the shared one, which is idle meanwhile."""
    made = []

    def make(options=None, **lifetime):
        shared_server.wait_until_idle()
        made.append(HttpServer(shared_server.service.llm, options, **lifetime))
        return made[-1]

    yield make
    for server in made:
        server.stop()
    shared_server.wait_until_idle()


@pytest.fixture(scope="session")
def library_text(shared_server):
    """What `LLM` makes of the server's greedy request, in the engine's own thread."""
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    llm = shared_server.service.llm
    (output,) = shared_server.on_engine(lambda _: llm.generate(PROMPT, params))
    return output.text
