"""Fixtures of floor 2: the command line's LLM, and calls that only the code under test checks."""

import sys
import types

import jaxtyping
import pytest

import jattn.checkpoint
from tests.jattn.harness.fake_llm import Delta, FakeLLM


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
