"""The inter-token bench drives the engine, on a Llama of two layers."""

import dataclasses

import pytest

from bench import inter_token
from bench.decode_step import random_model
from bench.inter_token import Arrival, measured
from bench.step_workload import LLAMA_3_8B
from tests.bench.test_decode_step import TOY
from tests.jattn.harness.tiny import one_variant

ARRIVAL = Arrival(running=2, ctx=20, prompt=200, prefill_tokens=16)


def test_measured_times_lie_between_tokens_of_the_running_requests():
    with one_variant("greedy"):
        row = measured(random_model(TOY), ARRIVAL)
    assert row.items() >= {"case": "inter_token", "running": 2, "prompt": 200, "prefill_tokens": 16}.items()
    assert 0 < row["alone_median_ms"] <= row["alone_worst_ms"]
    assert 0 < row["median_ms"] <= row["worst_ms"]
    assert row["first_token_ms"] > 6 * row["median_ms"]  # 13 chunks, half of them no shorter than the median


class Stalled:
    """An engine of which a running request gets no token."""

    def step(self):
        return []


def test_step_without_a_running_requests_token_is_noticed():
    with pytest.raises(RuntimeError, match="Each step must give every running request a token"):
        inter_token._inter_token_ms(Stalled(), [object()], lambda steps: steps == 1)


def test_command_line_prints_a_sentence_for_each_budget(monkeypatch, capsys):
    shapes, arrivals = [], []
    monkeypatch.setattr(inter_token, "random_model", shapes.append)

    def fake(model, arrival):
        arrivals.append(arrival)
        times = {"alone_median_ms": 1, "alone_worst_ms": 2, "median_ms": 3, "worst_ms": 4, "first_token_ms": 99}
        return dataclasses.asdict(arrival) | times

    monkeypatch.setattr(inter_token, "measured", fake)
    inter_token.main(["--prefill-tokens", "256", "512", "--running", "4"])
    assert shapes == [LLAMA_3_8B | {"max_position_embeddings": 65536}]
    assert arrivals == [Arrival(running=4, prefill_tokens=256), Arrival(running=4, prefill_tokens=512)]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("prefill_tokens 256: inter-token time of 4 running requests alone 1 ms (median), 2 ms (wor")
    assert second.endswith("arrives 3 ms (median), 4 ms (worst); its first token came after 99 ms.")
    inter_token.main(["--apart"])
    assert arrivals[-1] == Arrival(mixed_steps=False)
    assert capsys.readouterr().out.startswith("prefill_tokens 512, prefills and decodes apart: inter-token time of 32")
