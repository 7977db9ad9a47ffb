"""The bench of the host's time drives an engine and says where a step's time goes."""

import re

import pytest

from bench import host_time
from bench.step_workload import LLAMA_3_8B
from jattn.serving.engine import Engine
from jattn_models.llama import LlamaForCausalLM
from tests.jattn.harness.tiny import one_variant


def test_parts_of_a_step_are_measured(capsys, monkeypatch):
    monkeypatch.setattr(host_time, "_WARM_UP_STEPS", 2)
    monkeypatch.setattr(host_time, "_PROFILED_STEPS", 3)
    with one_variant("plain"):
        host_time.main(["--batch", "2", "--steps", "5", "--sampling", "nucleus", "--cpu-time"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Batch 2, nucleus: ")
    assert all(re.search(rf"\b{part} \d+\.\d", line) for part in ("plan", "arrays", "call", "take"))


@pytest.mark.slow
def test_a_model_of_random_weights_may_be_measured(capsys, monkeypatch):
    shapes = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "max_position_embeddings": 512,
    }
    monkeypatch.setitem(host_time.SHAPES, "llama-3-8b", (LLAMA_3_8B | shapes, LlamaForCausalLM))
    monkeypatch.setattr(host_time, "use_persistent_cache", lambda: None)
    monkeypatch.setattr(host_time, "_WARM_UP_STEPS", 2)
    monkeypatch.setattr(host_time, "_PROFILED_STEPS", 3)
    with one_variant("plain"):
        host_time.main(["--shapes", "llama-3-8b", "--batch", "2", "--steps", "5", "--sampling", "filtered"])
    assert capsys.readouterr().out.startswith("Batch 2, filtered: ")


def test_a_part_inside_another_counts_once():
    now = iter([0.0, 1.0, 4.0, 6.0])
    clock = host_time.Clock(lambda: next(now))
    inner = clock._timed("plan", lambda: None)
    clock._timed("step", inner)()
    assert (clock.seconds["plan"], clock.seconds["step"]) == (3.0, 3.0)


def test_clock_leaves_the_parts_as_they_were():
    before = Engine.step
    with host_time.Clock().running():
        assert Engine.step is not before
    assert Engine.step is before
