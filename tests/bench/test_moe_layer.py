"""Layers of experts that are timed do the work that they are named after, on a mixture of two small layers."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import mixture_workload, moe_layer, moe_layer_torch
from bench.mixture_workload import HeldWeights, MixtureShapes, MixtureWorkload
from bench.named_workloads import MIXTURES
from bench.timing import Timing
from jattn_kernels import route, routed_experts

SHAPES = MixtureShapes(model="toy", num_experts=8, per_token=2, hidden_size=32, units=16, layers=2)
WORKLOAD = MixtureWorkload(shapes=SHAPES, tokens=5)


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    monkeypatch.setattr(mixture_workload, "_MOST_CALLS", 3)


def test_weights_of_one_model_are_made_once():
    held = HeldWeights()
    first = held(SHAPES)
    assert held(SHAPES) is first
    other = held(MixtureShapes(model="other", num_experts=4, per_token=2, hidden_size=8, units=16, layers=2))
    assert other[0].shape == (2, 4, 8, 32)
    assert held(SHAPES) is not first


def test_every_layer_of_the_stack_is_run_as_often():
    assert WORKLOAD.calls == 2
    assert all(workload.calls % workload.shapes.layers == 0 < workload.calls for workload in MIXTURES)


def test_chosen_experts_are_those_that_routing_chooses():
    logits = WORKLOAD.logits()
    assert logits.shape == (2, 5, 8)
    for call, chosen in zip(logits, WORKLOAD.chosen(logits), strict=True):
        _, expected = route(jnp.asarray(call), SHAPES.routing)
        np.testing.assert_array_equal(np.sort(chosen), np.sort(expected))


def test_draws_are_what_they_are_named_after():
    shapes = MixtureShapes(model="toy", num_experts=64, per_token=4, hidden_size=32, units=16, layers=2)
    counts = {}
    for draw in ("uniform", "same", "zipf"):
        workload = MixtureWorkload(shapes=shapes, tokens=2000, draw=draw)
        chosen = workload.chosen(workload.logits())
        counts[draw] = np.sort(np.bincount(chosen.ravel(), minlength=64))[::-1] / chosen[..., 0].size
    assert counts["uniform"].max() / counts["uniform"].min() < 1.5
    np.testing.assert_array_equal(counts["same"], [1.0] * 4 + [0.0] * 60)
    assert counts["zipf"][0] > 0.6
    assert counts["zipf"][0] > 10 * counts["zipf"][40] > 0


def test_experts_met_are_counted_in_each_call():
    logits = np.zeros((2, 5, 8), np.float32)
    logits[0, :, :2] = 1.0  # two experts
    logits[1, np.arange(5), [0, 1, 2, 3, 4]] = logits[1, :, 7] = 1.0  # six
    assert WORKLOAD.met(logits) == 4.0
    assert WORKLOAD.read_bytes(4.0) == 4 * (32 * 2 * 16 + 16 * 32) * 2
    assert WORKLOAD.flops == 2 * 5 * 2 * (32 * 2 * 16 + 16 * 32)


def test_calls_give_what_each_layer_gives():
    weights, given = SHAPES.weights(), WORKLOAD.given(WORKLOAD.logits())
    outs = WORKLOAD.compiled("xla")(given, weights)
    assert len(outs) == 2
    for (x, logits), gate_up, down, out in zip(given, *weights, outs, strict=True):
        expected = routed_experts(x, logits, SHAPES.routing, gate_up, down)
        assert moe_layer_torch.relative_error(np.float32(out), np.float32(expected)) < 0.01


def test_weights_keep_the_size_of_what_they_are_given():
    weights, given = SHAPES.weights(), WORKLOAD.given(WORKLOAD.logits())
    out = WORKLOAD.compiled("xla")(given, weights)[-1].astype(jnp.float32)
    assert 0.1 < float(jnp.std(out)) < 3


def test_a_row_says_what_was_met_and_reached():
    row, _ = moe_layer.measured(WORKLOAD, "xla", HeldWeights(), repeats=1, seconds=0.001)
    assert row.items() >= WORKLOAD.fields().items()
    assert row["impl"] == "jattn-xla"
    assert row["experts_met"] == WORKLOAD.met(WORKLOAD.logits())
    assert 0 < row["min_us"] <= row["time_us"]
    assert {"read_GBps", "read_share", "TFLOPs", "roofline_share", "compile_s", "temp_MB"} <= row.keys()


def test_rates_are_of_the_time():
    row = moe_layer.mixture_row(MIXTURES[5], "some", Timing(1000.0, 990.0), 128.0)
    assert (row["model"], row["tokens"]) == ("Qwen3-30B-A3B", 8192)
    assert row["TFLOPs"] == pytest.approx(618.5, abs=0.1)
    assert row["read_GBps"] == pytest.approx(1208.0, abs=0.1)
    assert row["roofline_share"] == pytest.approx(0.836, abs=0.001)


def test_torch_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(NotImplementedError, match="PyTorch is not installed"):
        moe_layer_torch.measured(WORKLOAD, HeldWeights(), executable=None)


def test_a_replay_is_waited_for_as_arrays_are():
    waited = []
    replay = object.__new__(moe_layer_torch.Replay)
    replay._torch = type("Torch", (), {"cuda": type("Cuda", (), {"synchronize": lambda: waited.append(1)})})
    jax.block_until_ready(replay)
    assert waited == [1]
