"""Which steps an engine compiles: one for each launch that there may be, and not many."""

import dataclasses

import jax
import pytest

from jattn.serving.executor.step_plans import step_key
from jattn.serving.request import SamplingParams
from tests.jattn.harness.tiny import CONFIG, plans_of

ASKED = {"greedy": {"temperature": 0.0}, "plain": {"temperature": 1.0}, "full": {"temperature": 0.0, "logprobs": 1}}


@pytest.fixture(scope="module")
def engine():
    return plans_of(dataclasses.replace(CONFIG, prefill_tokens=8192))


@pytest.mark.parametrize("asked", ASKED)
def test_each_launch_has_its_step(engine, asked):
    requests = [engine.make_request([1], SamplingParams(**ASKED[asked]))]
    plans, config = engine.executor.compiled_steps, engine.config
    buckets = {"decode": config.decode_buckets, "prefill": config.prefill_buckets}
    found = {step_key(kind, size, requests, config) for kind, sizes in buckets.items() for size in sizes}
    assert found <= set(plans)
    assert {key.variant for key in found} == {asked}


def test_request_that_asks_for_most_decides(engine):
    requests = [engine.make_request([1], SamplingParams(**asked)) for asked in ASKED.values()]
    keys = [step_key("decode", 4, requests[:count], engine.config) for count in (1, 2, 3)]
    assert [key.variant for key in keys] == ["greedy", "plain", "full"]


def test_without_greedy_steps_those_that_draw_serve_all():
    engine = plans_of(dataclasses.replace(CONFIG, greedy_steps=False, full_sampling=False))
    plans, config = engine.executor.compiled_steps, engine.config
    assert {key.variant for key in plans} == {"plain"}
    requests = [engine.make_request([1], SamplingParams(temperature=0.0))]
    assert {step_key("decode", size, requests, config) for size in config.decode_buckets} <= set(plans)
    assert {step_key("prefill", size, requests, config) for size in config.prefill_buckets} <= set(plans)


def test_finer_buckets_cost_a_bounded_number_of_steps(engine):
    """Of 8,192 tokens: 8 sizes by doubling alone, 20 so."""
    prefills = [key for key in engine.executor.compiled_steps if key.kind == "prefill"]
    assert len(prefills) == 20 * 3


def test_no_forward_pass_or_score_asks_the_device_what_to_do():
    """XLA's host waits for the answer of a condition. (Filters have one where no kernel serves them, as on a CPU.)"""
    engine = plans_of(dataclasses.replace(CONFIG, structured_steps=True))
    for key, plan in engine.executor.compiled_steps.items():
        if key.kind in ("forward_prefill", "forward_decode", "note", "score"):
            assert " cond[" not in str(jax.make_jaxpr(plan.function)(*plan.arguments)), key
