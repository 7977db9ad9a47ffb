"""The prefix cache's bench drives the engine, on a Llama of two layers."""

import dataclasses

import pytest

from bench import prefix_cache
from bench.decode_step import random_model
from bench.prefix_cache import Traffic, measured
from bench.step_workload import LLAMA_3_8B
from tests.bench.test_decode_step import TOY
from tests.jattn.harness.tiny import one_variant
from tests.often import slow

TRAFFIC = Traffic(groups=2, of_group=3, shared=96, own=20, out=3, running=2, prefill_tokens=64)


@pytest.mark.parametrize("enabled", [True, slow(False)])
def test_measured_counts_what_was_not_computed(enabled):
    with one_variant("greedy"):
        row = measured(random_model(TOY), TRAFFIC, enable_prefix_caching=enabled)
    # The first of each group computes all.
    assert row["hit_rate"] == (round(4 * 96 / (6 * 116), 3) if enabled else 0)
    assert 0 < row["first_token_ms"] <= row["first_token_p99_ms"]
    assert row["tokens_per_s"] > 0


def test_prompts_of_a_group_begin_alike_and_end_apart():
    prompts = TRAFFIC.prompts(1000, seed=0)
    assert len({tuple(prompt[:96]) for prompt in prompts}) == 2
    assert len({tuple(prompt[96:]) for prompt in prompts}) == 6
    assert {tuple(prompt[:96]) for prompt in TRAFFIC.prompts(1000, seed=1)}.isdisjoint(
        tuple(prompt[:96]) for prompt in prompts
    )


def test_command_line_prints_a_sentence_without_it_and_one_with_it(monkeypatch, capsys):
    shapes, asked = [], []
    monkeypatch.setattr(prefix_cache, "random_model", shapes.append)

    def fake(model, traffic, *, enable_prefix_caching):
        asked.append((traffic, enable_prefix_caching))
        times = {"hit_rate": 0.5, "first_token_ms": 1, "first_token_p99_ms": 2, "tokens_per_s": 3}
        return dataclasses.asdict(traffic) | times | {"enable_prefix_caching": enable_prefix_caching}

    monkeypatch.setattr(prefix_cache, "measured", fake)
    prefix_cache.main(["--shared", "4096", "--of-group", "2"])
    assert shapes == [LLAMA_3_8B | {"max_position_embeddings": 4096 + 128 + 64}]
    assert asked == [(Traffic(shared=4096, of_group=2), enabled) for enabled in (False, True)]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "Without the prefix cache, 16 requests at a time with 4,096 shared and 128 own tokens: first"
    )
    assert second.endswith("3 tokens a second, 50.0% of the prompts' tokens not computed.")
