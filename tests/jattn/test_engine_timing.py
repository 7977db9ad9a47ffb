"""How long requests wait for each other, and how much of launches is padding, on a device that takes a tick a token."""

import dataclasses

import numpy as np
import pytest

from jattn.serving.config import EngineConfig
from jattn.serving.request import SamplingParams
from tests.jattn.harness.simulated_device import SimulatedDevice
from tests.often import slow

LONG = 2**15
BUDGET = 512
CONFIG = EngineConfig(
    num_pages=4096,
    page_size=16,
    max_num_seqs=16,
    max_context_len=LONG + 1024,
    prefill_tokens=BUDGET,
    prefill_seqs=4,
    enable_prefix_caching=False,  # all prompts are alike
)
ENDLESS = SamplingParams(max_tokens=1024, ignore_eos=True)


def inter_token_times(monkeypatch, long_len=LONG, **changes):
    """Of 8 running requests, step by step from the arrival of a long prompt until it has its first token."""
    device = SimulatedDevice(dataclasses.replace(CONFIG, **changes), monkeypatch)
    running = [device.engine.make_request([1] * 16, ENDLESS) for _ in range(8)]
    long = device.engine.make_request([1] * long_len, ENDLESS)
    for request in running:
        device.engine.add(request)
    while not all(request.generated for request in running):
        device.step()
    device.engine.add(long)
    latest, times = device.now, []
    while not long.generated:
        events = device.step()
        assert {event.request for event in events} >= set(running)  # each step serves them all
        times.append(device.now - latest)
        latest = device.now
    return times


@pytest.mark.parametrize(
    ("changes", "chunk"),
    [
        ({"mixed_steps": True}, BUDGET - 8),
        slow({"max_chunk_tokens": 128}, 128),
        ({"mixed_steps": False}, BUDGET),
        ({"mixed_steps": True, "max_chunk_tokens": 128}, 128),
        ({"mixed_steps": True, "prefill_tokens": 16, "long_len": 512}, 8),
        ({"mixed_steps": True, "prefill_tokens": 15, "long_len": 512}, 15),  # 8 decodes would take more than half of it
    ],
)
def test_decodes_wait_for_one_chunk_of_a_long_prompt_at_most(monkeypatch, changes, chunk):
    times = inter_token_times(monkeypatch, **changes)
    assert len(times) >= changes.get("long_len", LONG) // chunk
    assert max(times) == chunk + 8  # one chunk, and one token of each running request


def test_decodes_wait_for_the_whole_prompt_without_a_budget(monkeypatch):
    assert max(inter_token_times(monkeypatch, prefill_tokens=LONG + 8)) == LONG + 8


@pytest.mark.parametrize(
    ("max_chunk_tokens", "most_steps"), [(None, LONG // BUDGET + 2), (BUDGET // 2, 3)], ids=["fcfs", "bounded_chunk"]
)
def test_short_prompt_behind_a_long_one_waits_for_the_budget_it_leaves(monkeypatch, max_chunk_tokens, most_steps):
    device = SimulatedDevice(dataclasses.replace(CONFIG, max_chunk_tokens=max_chunk_tokens), monkeypatch)
    long, short = (device.engine.make_request([1] * size, ENDLESS) for size in (LONG, 64))
    device.engine.add(long)
    device.step()
    device.engine.add(short)
    steps = 0
    while not short.generated:
        device.step()
        steps += 1
    assert steps <= most_steps
    assert bool(long.generated) == (max_chunk_tokens is None)


def test_several_long_prompts_share_the_budget_in_order_of_arrival(monkeypatch):
    device = SimulatedDevice(dataclasses.replace(CONFIG, max_chunk_tokens=BUDGET // 2, num_pages=8192), monkeypatch)
    requests = [device.engine.make_request([1] * LONG, ENDLESS) for _ in range(3)]
    for request in requests:
        device.engine.add(request)
    device.step()
    assert [request.num_computed for request in requests] == [BUDGET // 2, BUDGET // 2, 0]
    while not requests[0].generated:
        device.step()
    assert [len(request.generated) for request in requests] == [1, 1, 0]


def test_little_of_the_launches_of_a_mix_is_padding(monkeypatch):
    """Prompts of 500 to 1,000 tokens arrive, a few a launch, so that no launch is full."""
    sizes = {"max_num_seqs": 64, "prefill_tokens": 8192, "prefill_seqs": 64, "num_pages": 2**16}
    device = SimulatedDevice(dataclasses.replace(CONFIG, **sizes), monkeypatch)
    rng = np.random.default_rng(0)
    for _ in range(25):
        for length in rng.integers(500, 1000, rng.integers(3, 9)).tolist():
            device.engine.add(device.engine.make_request([1] * length, SamplingParams(max_tokens=2)))
        device.step()
    tokens, padded = np.sum(device.prefills, axis=0)
    assert 1 - tokens / padded < 1 / 8
