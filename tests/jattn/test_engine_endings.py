"""Requests that end early, by an abort or by logits that are not finite: their pages are free, no neighbour notices."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.serving.request import RequestStatus
from tests.jattn.harness.tiny import run, sampled, tiny_engine, with_steps_of

LONG_PROMPT = list(range(100, 140))  # 10 of the pool's 16 pages


@pytest.fixture
def engine():
    return tiny_engine()


@pytest.fixture
def poison(engine, monkeypatch):
    """Makes a token's embedding NaN, for the rest of the test."""

    def poison(token):
        weights = nnx.clone(engine.executor.weights)
        embedding = weights.vocabulary.embedding
        embedding[...] = embedding[...].at[token].set(jnp.nan)
        monkeypatch.setattr(engine.executor, "weights", weights)

    return poison


def alone(engine, *arguments):
    (tokens,) = run(engine, [engine.make_request(*arguments)])
    return list(tokens)


STAGES = {
    "waiting": lambda request: request.status is RequestStatus.WAITING,
    "prefill": lambda request: request.status is RequestStatus.PREFILL and request.num_computed > 0,
    "running": lambda request: len(request.generated) == 2,
    "preempted": lambda request: request.num_preemptions and request.status is RequestStatus.WAITING,
}


@pytest.mark.parametrize("stage", STAGES)
def test_abort_frees_pages_at_once_and_harms_no_neighbour(engine, stage):
    neighbours = ([7, 8, 9, 10], sampled(seed=1, max_tokens=14)), (LONG_PROMPT, sampled(seed=2, max_tokens=4))
    expected = [alone(engine, *neighbour) for neighbour in neighbours]
    elder, heir = (engine.make_request(*neighbour) for neighbour in neighbours)
    victim = engine.make_request(list(range(200, 240)), sampled(seed=3, max_tokens=20))
    for request in (elder, heir, victim) if stage == "waiting" else (elder, victim, heir):
        engine.add(request)
    engine.step()
    while not STAGES[stage](victim):
        engine.step()
    pages, free, tokens = set(victim.pages), engine.kv_cache.num_free, list(victim.generated)
    assert any(victim in launch.requests for launch in engine.executor.in_flight) == (stage == "running")

    engine.abort(victim)
    assert (victim.pages, victim.row, victim.finish_reason) == ([], None, "abort")
    assert engine.kv_cache.num_free == free + len(pages)
    events = engine.step()
    assert victim not in [event.request for event in events]
    assert set(heir.pages) & pages or not pages  # the heir writes where launches of the victim still may
    run(engine)
    assert [elder.generated, heir.generated] == expected
    assert victim.generated == tokens


def test_launches_run_in_order_for_each_consumes_the_pool_of_the_one_before(engine, monkeypatch):
    steps, results = engine.executor.compiled_steps, [(engine.executor.state, engine.executor.pool, None)]

    def spied(key, weights, state, pool, *arguments):
        assert state is results[-1][0]
        assert pool is results[-1][1]
        results.append(steps(key, weights, state, pool, *arguments))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(pool))
        return results[-1]

    monkeypatch.setattr(engine.executor, "compiled_steps", spied)
    alone(engine, [5, 6], sampled(seed=0, max_tokens=4))
    assert len(results) >= 5


def served(engine, requests, victim=None):
    """Tokens of each request, and its keys and values in the pool when it had eight tokens; the victim's events."""
    for request in [*requests, victim] if victim else requests:
        engine.add(request)
    cached, events = {}, []
    while engine.has_work:
        events += [event for event in engine.step() if event.request is victim]
        for request in requests:
            if len(request.generated) == 8 and request not in cached:
                pages, group = jnp.array(request.pages, jnp.int32), engine.executor.pool.groups[0]
                keys, values = (np.asarray(pool[:, pages]).reshape(2, -1, 2, 8) for pool in (group.k, group.v))
                length = len(request.prompt) + 7
                cached[request] = (keys[:, :length].tobytes(), values[:, :length].tobytes())
    assert engine.kv_cache.num_free == engine.kv_cache.num_pages
    return [(request.generated, *cached[request]) for request in requests], events


@pytest.mark.parametrize("where", ["prompt", "generated"])
def test_nan_logits_end_their_request_and_leave_neighbours_bit_identical(engine, poison, where):
    def neighbours():
        return [engine.make_request(list(range(i, 4 * i)), sampled(seed=i, max_tokens=10)) for i in (1, 2, 3)]

    expected, _ = served(engine, neighbours())
    prompt, params = [400, 401, 402], sampled(seed=9, max_tokens=10)
    clean = alone(engine, prompt, params)
    token, before = (prompt[1], []) if where == "prompt" else (clean[2], clean[:3])
    assert not any(token in [*range(1, 12), *tokens] for tokens, *_ in expected)
    poison(token)
    victim = engine.make_request(prompt, params)
    found, events = served(engine, neighbours(), victim)
    assert found == expected
    assert victim.generated == before
    assert [event.token for event in events] == [*before, None]
    assert [event.finish_reason for event in events] == [None] * len(before) + ["error"]
    assert victim.error.startswith(f"The model's logits after {3 + len(before)} tokens are NaN or infinite")


def test_pages_that_hold_nan_serve_their_next_owner_unharmed(engine, poison, monkeypatch):
    request = LONG_PROMPT, sampled(seed=4, max_tokens=18)
    expected = alone(engine, *request)
    poison(300)
    victim = engine.make_request([300] * 40, sampled(seed=5, max_tokens=2))
    engine.add(victim)
    engine.step()
    row = victim.row
    run(engine)
    assert victim.finish_reason == "error"
    assert engine.executor.state.finished[row]
    monkeypatch.undo()
    values = np.asarray(engine.executor.pool.groups[0].v)
    held = set(np.flatnonzero(np.isnan(values).any(axis=(0, 2, 3, 4))).tolist())
    assert len(held) == 10
    heir = engine.make_request(*request)
    engine.add(heir)
    engine.step()
    assert len(held & set(heir.pages)) >= 5
    run(engine)
    assert heir.generated == expected


def test_engine_waits_for_its_launches_before_it_goes(monkeypatch):
    engine = with_steps_of(tiny_engine())
    requests = [engine.make_request([1, 2, 3], sampled(seed, 40)) for seed in range(2)]
    for request in requests:
        engine.add(request)
    engine.step()
    engine.step()
    outputs = [launch.output for launch in engine.executor.in_flight]
    assert outputs
    gc.collect()  # other engines go first
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    del engine
    gc.collect()
    assert waited == [(output, []) for output in outputs]
