"""An engine that was told no number of pages has those that its weights and its steps leave memory for."""

import dataclasses
import types

import jax
import pytest

from jattn import step_compilation
from jattn.serving.engine import Engine
from jattn.serving.executor import pool_size
from tests.jattn.harness.tiny import CONFIG, VOCAB, one_variant, plans_of, run, sampled, tiny_engine, tiny_model

OPEN = dataclasses.replace(CONFIG, num_pages=None)
PAGE_BYTES = 2 * 2 * 4 * 2 * 8 * 4  # keys and values of 2 layers, 4 tokens, 2 heads of width 8 in float32


@pytest.fixture
def memory(monkeypatch):
    """Sets what the device says of its memory."""

    def has(limit, in_use):
        device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": limit, "bytes_in_use": in_use})
        monkeypatch.setattr(jax, "local_devices", lambda: [device])

    return has


@pytest.fixture
def compiled(monkeypatch):
    """The keys of the steps that are compiled to see what they need."""
    keys, compile_steps = [], pool_size.compile_steps

    def noted(plans, **options):
        keys.append(set(plans))
        return compile_steps(plans, **options)

    monkeypatch.setattr(pool_size, "compile_steps", noted)
    return keys


def test_pages_weights_and_steps_fit_the_memory_and_leave_little(memory, compiled, monkeypatch):
    monkeypatch.setattr(pool_size, "_estimate", lambda *_: 0)
    in_use = 100_000
    with one_variant("plain"):
        needed = Engine(tiny_model(), CONFIG).executor.memory_use()
        limit = (in_use + needed.state + needed.temporaries + 120 * PAGE_BYTES) * 100 // 97
        memory(limit, in_use)
        engine = Engine(tiny_model(), OPEN)
    (keys,) = compiled
    assert {(key.kind, key.size) for key in keys} == {("decode", 4), ("prefill", 16), ("note", 16)}
    use = engine.executor.memory_use()
    rest = limit - in_use - use.state - use.temporaries - use.pool
    assert use.pool == engine.config.num_pages * PAGE_BYTES
    largest = VOCAB * 32 * 4 * 5 // 4  # of its products, which XLA may try
    # On a CPU what a step needs differs a little with the pool.
    assert 0.02 * limit <= rest - largest < 0.04 * limit + PAGE_BYTES
    assert 2 < engine.config.num_pages == engine.executor.config.num_pages <= 4 * 16
    run(engine, [engine.make_request([3, 1, 4], sampled(seed=1, max_tokens=5))])


def test_steps_tried_for_the_pool_that_stands_are_not_compiled_again(memory, monkeypatch):
    memory(600_000, 0)
    monkeypatch.setattr(pool_size, "_TOO_MANY", 1)  # whatever is tried stands
    plans, lower = [], step_compilation._lowered
    monkeypatch.setattr(step_compilation, "_lowered", lambda plan: plans.append(plan) or lower(plan))
    with one_variant("plain"):
        engine = Engine(tiny_model(), OPEN)
    assert len(plans) == len(engine.executor.compiled_steps.records)
    run(engine, [engine.make_request([3, 1, 4], sampled(seed=1, max_tokens=5))])


def test_pool_that_no_request_can_fill_is_not_asked_for(memory, compiled):
    memory(10**9, 0)
    engine = plans_of(OPEN)
    assert engine.config.num_pages == 4 * 16 + 1
    assert not compiled


def test_given_number_stands(memory, compiled):
    memory(600_000, 100_000)
    assert plans_of(CONFIG).config.num_pages == CONFIG.num_pages
    assert not compiled


def test_memory_that_steps_use_up_leaves_no_pool(memory):
    memory(tiny_engine().executor.memory_use().state + 3 * PAGE_BYTES, 0)
    with one_variant("plain"), pytest.raises(ValueError, match="`page_size` must be so small that 2 pages fit"):
        plans_of(OPEN)
