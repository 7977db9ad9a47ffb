"""The serving loop on the bundled checkpoint: same tokens in a crowd as alone, no compilation, no page lost."""

import dataclasses
import random
import sys
from importlib.metadata import entry_points

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.checkpoint import Checkpoint
from jattn.model import model_class
from jattn.serving import engine as engine_module
from jattn.serving import kv_cache, scheduler
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.executor import executor as executor_module
from jattn.serving.executor import launch, pool_memory
from jattn.serving.request import SamplingParams
from tests.jattn.harness import one_pass, tiny

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SMALL = EngineConfig(
    num_pages=24,
    page_size=8,
    max_num_seqs=8,
    max_context_len=128,
    prefill_tokens=64,
    smallest_decode_bucket=1,
    full_sampling=False,
)


@pytest.fixture(scope="module")
def model():
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    checkpoint = Checkpoint(point.load()())
    return model_class(checkpoint.architecture).from_checkpoint(checkpoint, dtype=jnp.float32)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, SMALL)


def run(engine, requests):
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert engine.kv_cache.num_free == engine.kv_cache.num_pages
    return [request.generated for request in requests]


def random_prompts(count, vocab_size, longest, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def best_gap(model, tokens):
    """How far the best logit after `tokens` is ahead of the second best."""
    second, best = np.sort(one_pass.logits(model, tokens, context=SMALL.max_context_len)[-1])[-2:]
    return best - second


def assert_same_up_to_ties(model, prompt, tokens, expected):
    for i, (token, wanted) in enumerate(zip(tokens, expected, strict=True)):
        if token != wanted:
            assert best_gap(model, prompt + expected[:i]) < 1e-4, f"token {i}: {token} != {wanted}"
            return


def test_crowd_with_preemption_gives_each_request_its_tokens_alone(model, engine):
    prompts = random_prompts(64, model.vocab_size, longest=60)
    crowd = [
        engine.make_request(prompt, dataclasses.replace(GREEDY, max_tokens=1 + i % 40))
        for i, prompt in enumerate(prompts)
    ]
    together = run(engine, crowd)
    assert any(request.num_preemptions for request in crowd)
    for prompt, request, tokens in zip(prompts, crowd, together, strict=True):
        (alone,) = run(engine, [engine.make_request(prompt, request.params)])
        assert len(tokens) == request.params.max_tokens
        assert_same_up_to_ties(model, prompt, tokens, alone)


def test_flashinfers_surface_serves_the_same_text(model, engine):
    other = Engine(model, dataclasses.replace(SMALL, backend="flashinfer", smallest_decode_bucket=8))
    texts = []
    for each in (engine, other):
        prompts = random_prompts(5, model.vocab_size, 90, seed=3)
        texts.append(run(each, [each.make_request(prompt, GREEDY) for prompt in prompts]))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("backend", ["paged", "flashinfer"])
def test_text_over_fp8_pages_does_not_depend_on_where_its_prompt_is_cut(model, backend):
    texts = []
    for prefill_tokens in (96, 8):
        facts = {"backend": backend, "kv_cache_dtype": "fp8_e5m2", "prefill_tokens": prefill_tokens}
        buckets = {"smallest_prefill_bucket": prefill_tokens, "smallest_decode_bucket": 8, "prefill_seqs": 1}
        engine = Engine(model, dataclasses.replace(SMALL, **facts, **buckets, full_sampling=False))
        prompts = random_prompts(6, model.vocab_size, 90, seed=3)
        texts.append(run(engine, [engine.make_request(prompt, GREEDY) for prompt in prompts]))
    assert texts[0] == texts[1]


def test_crowd_in_one_bucket_gives_exactly_the_tokens_alone(model):
    one_bucket = dataclasses.replace(SMALL, num_pages=200, smallest_decode_bucket=8, prefill_seqs=1)
    engine = Engine(model, one_bucket)
    prompts = random_prompts(8, model.vocab_size, longest=60, seed=1)
    together = run(engine, [engine.make_request(prompt, GREEDY) for prompt in prompts])
    alone = [run(engine, [engine.make_request(prompt, GREEDY)])[0] for prompt in prompts]
    assert together == alone


def test_sampled_text_does_not_depend_on_neighbours(model, engine):
    params = SamplingParams(max_tokens=16, temperature=1.0, top_k=50, top_p=0.9, seed=7, ignore_eos=True)
    prompts = random_prompts(5, model.vocab_size, longest=20, seed=2)
    together = run(engine, [engine.make_request(prompt, params) for prompt in prompts])
    alone = [run(engine, [engine.make_request(prompt, params)])[0] for prompt in prompts]
    assert together == alone
    other = run(engine, [engine.make_request(prompts[0], dataclasses.replace(params, seed=8))])[0]
    assert other != alone[0]


def test_stop_token_ends_a_request_and_is_its_last(model, engine):
    (prompt,) = random_prompts(1, model.vocab_size, longest=20, seed=3)
    (free,) = run(engine, [engine.make_request(prompt, GREEDY)])
    stop = free[10]
    request = engine.make_request(prompt, dataclasses.replace(GREEDY, stop_token_ids=(stop,)))
    (stopped,) = run(engine, [request])
    assert stopped == free[: free.index(stop) + 1]
    assert request.finish_reason == "stop"


def test_events_of_a_step_belong_to_launches_before_it(model, engine):
    (prompt,) = random_prompts(1, model.vocab_size, longest=20, seed=6)
    engine.add(engine.make_request(prompt, dataclasses.replace(GREEDY, max_tokens=3)))
    counts = [len(engine.step()) for _ in range(5)]
    assert counts == [0, 1, 1, 1, 0]
    assert not engine.has_work


def interrupt_after(steps, calls):
    """Compiled steps of which one is cut short once it has consumed what was donated."""

    def call(*arguments):
        nonlocal calls
        results = steps(*arguments)
        calls -= 1
        if calls == 0:
            raise KeyboardInterrupt
        return results

    return call


@pytest.mark.parametrize("calls", [1, 2, 9, 30])
def test_interrupted_launch_loses_no_request(model, engine, monkeypatch, calls):
    prompts = random_prompts(12, model.vocab_size, longest=40, seed=7)
    expected = run(engine, [engine.make_request(prompt, GREEDY) for prompt in prompts])
    requests = [engine.make_request(prompt, GREEDY) for prompt in prompts]
    monkeypatch.setattr(engine.executor, "compiled_steps", interrupt_after(engine.executor.compiled_steps, calls))
    with pytest.raises(KeyboardInterrupt):
        run(engine, requests)
    run(engine, [])
    for prompt, request, wanted in zip(prompts, requests, expected, strict=True):
        assert_same_up_to_ties(model, prompt, request.generated, wanted)
    assert all(request.finish_reason == "length" for request in requests)


@pytest.mark.parametrize("seed", range(8))
def test_interrupts_at_random_lines_lose_no_request(model, engine, seed):
    files = {module.__file__ for module in (engine_module, executor_module, kv_cache, launch, scheduler)}
    rng = random.Random(seed)
    lines_left = rng.randrange(2000)

    def trace(frame, event, argument):
        nonlocal lines_left
        if frame.f_code.co_filename not in files:
            return None
        lines_left -= event == "line"
        if lines_left == 0:
            lines_left = rng.randrange(2000)
            raise KeyboardInterrupt
        return trace

    prompts = random_prompts(12, model.vocab_size, longest=30, seed=seed)
    params = dataclasses.replace(GREEDY, max_tokens=12)
    expected = run(engine, [engine.make_request(prompt, params) for prompt in prompts])
    requests = [engine.make_request(prompt, params) for prompt in prompts]
    for request in requests:
        engine.add(request)
    interrupts = 0
    before = sys.gettrace()
    while engine.has_work and interrupts < 5:
        sys.settrace(trace)
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            sys.settrace(before)
    run(engine, [])
    assert interrupts
    for prompt, request, wanted in zip(prompts, requests, expected, strict=True):
        assert_same_up_to_ties(model, prompt, request.generated, wanted)


def test_rows_are_sent_to_decodes_only_when_a_page_opens(model, engine, monkeypatch):
    sent, steps = [], engine.executor.compiled_steps

    def call(step, *arguments):
        sent.append(arguments[-1])
        return steps(step, *arguments)

    monkeypatch.setattr(engine.executor, "compiled_steps", call)
    run(engine, [engine.make_request([1], GREEDY)])
    decodes = sent[1:]
    assert len(decodes) >= GREEDY.max_tokens - 1
    assert len({id(plan) for plan in decodes}) <= 2 + GREEDY.max_tokens // SMALL.page_size


def test_transfer_that_fails_is_made_again(monkeypatch):
    engine = tiny.tiny_engine()
    (expected,) = tiny.run(engine, [engine.make_request([1, 2], GREEDY)])
    fresh = Engine(tiny.tiny_model(), tiny.CONFIG)  # which gives the request the same row and pages again
    request = fresh.make_request([1, 2], GREEDY)
    put, sent = jax.device_put, []

    def put_first_in_vain(array):
        sent.append((array, put(array)))
        if len(sent) == 1:
            sent[0][1].delete()
        return sent[-1][1]

    monkeypatch.setattr(jax, "device_put", put_first_in_vain)
    with pytest.raises(RuntimeError, match="deleted"):
        run(fresh, [request])
    run(fresh, [])
    np.testing.assert_array_equal(sent[0][0], sent[1][0])
    assert request.generated == expected


def test_abort_amid_a_step_waits_for_its_end(model, engine, monkeypatch):
    requests = [engine.make_request(prompt, GREEDY) for prompt in random_prompts(3, model.vocab_size, 20, seed=8)]
    monkeypatch.setattr(engine.scheduler, "must_preempt", lambda: engine.abort(requests[0]))
    for request in requests:
        engine.add(request)
    engine.step()
    assert [request.finish_reason for request in requests] == ["abort", None, None]
    monkeypatch.undo()
    run(engine, [])


@pytest.mark.parametrize(("num_pages", "page_size"), [(10**9, 16), (10**18, 16), (2, 10**9)])
def test_pool_beyond_the_memory_is_refused(model, num_pages, page_size):
    with pytest.raises(ValueError, match=rf"pool needs \d+ bytes, .* Got num_pages={num_pages}, page_size={page_size}"):
        Engine(model, dataclasses.replace(SMALL, num_pages=num_pages, page_size=page_size))


def test_pool_that_the_allocator_refuses_is_refused(model, monkeypatch):
    def exhausted(*arguments, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(pool_memory, "make_pool", exhausted)
    with pytest.raises(ValueError, match=r"pool needs \d+ bytes, .* Got num_pages=24"):
        Engine(model, SMALL)


@pytest.mark.parametrize(("field", "value", "least"), [("num_pages", 0, 2), ("num_pages", 1, 2), ("page_size", 0, 1)])
def test_config_below_the_least_size_is_refused(field, value, least):
    with pytest.raises(ValueError, match=rf"`{field}` must be a whole number of at least {least}. Got {value}"):
        dataclasses.replace(SMALL, **{field: value})


def test_context_end_stops_a_request(model, engine):
    prompt = random_prompts(1, model.vocab_size, longest=1)[0] * 120
    request = engine.make_request(prompt, dataclasses.replace(GREEDY, max_tokens=1000))
    (tokens,) = run(engine, [request])
    assert len(tokens) == 8
    assert request.finish_reason == "length"


def test_abort_at_any_stage_frees_its_pages(model, engine):
    prompts = random_prompts(12, model.vocab_size, longest=60, seed=4)
    for steps in range(6):
        requests = [engine.make_request(prompt, GREEDY) for prompt in prompts]
        for request in requests:
            engine.add(request)
        for _ in range(steps):
            engine.step()
        for request in requests:
            engine.abort(request)
        assert engine.kv_cache.num_free == engine.kv_cache.num_pages
    (alone,) = run(engine, [engine.make_request(prompts[0], GREEDY)])
    assert len(alone) == GREEDY.max_tokens


def test_no_compilation_in_200_steps_of_changing_batches(model, engine):
    rng = random.Random(5)
    prompts = iter(random_prompts(400, model.vocab_size, longest=60, seed=5))
    compilations = []

    def count(event, duration, **_):
        if "compile" in event:
            compilations.append(event)

    def arrive():
        params = SamplingParams(max_tokens=rng.randint(1, 20), temperature=rng.choice([0.0, 0.8]), ignore_eos=True)
        engine.add(engine.make_request(next(prompts), params))

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        jax.jit(lambda x: x + 1)(jnp.zeros(3))
        assert compilations, "the listener must see a compilation when there is one"
        compilations.clear()
        for _ in range(200):
            while rng.random() < 0.6:
                arrive()
            engine.step()
        assert not compilations
        while engine.has_work:
            engine.step()
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert not compilations


@pytest.mark.parametrize("step", [("decode", 8, "greedy"), ("prefill", 64, "plain")])
def test_temporary_memory_does_not_grow_with_the_pool(model, engine, step):
    small = engine.executor.compiled_steps[step].memory_analysis()
    large = Engine(model, dataclasses.replace(SMALL, num_pages=24 * 16)).executor.compiled_steps[step].memory_analysis()
    assert large.alias_size_in_bytes > 10 * 2**20 > small.alias_size_in_bytes
    assert large.temp_size_in_bytes <= 1.01 * small.temp_size_in_bytes


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ([], GREEDY, "A prompt must have at least one token"),
        ([1] * 128, GREEDY, r"room for a token in the context of 128 tokens. Got a prompt of 128"),
        ([1, 2048], GREEDY, r"below 2048. Got 2048"),
        ([1, -1], GREEDY, r"at least 0 and below 2048. Got -1"),
        ([1, 1.5], GREEDY, r"Token ids must be whole numbers at least 0 and below 2048. Got 1.5"),
        (["a"], GREEDY, r"Token ids must be whole numbers .* Got 'a'"),
        (b"abc", GREEDY, r"Token ids must be whole numbers .* Got b'abc'"),
        (5, GREEDY, r"Token ids must be whole numbers .* Got 5"),
        ([1], dataclasses.replace(GREEDY, stop_token_ids=tuple(range(9))), "may have 8 stop tokens"),
    ],
)
def test_request_that_cannot_be_served_is_refused(engine, prompt, params, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine.make_request(prompt, params)
    assert not engine.has_work


def test_request_larger_than_the_pool_is_refused(model):
    engine = Engine(model, dataclasses.replace(SMALL, num_pages=5, max_num_seqs=1))
    with pytest.raises(ValueError, match=r"needs 6 pages of 8; the pool has 4"):
        engine.make_request([1] * 20, GREEDY)


def test_context_beyond_the_models_is_refused(model):
    with pytest.raises(ValueError, match=r"`max_context_len` must not exceed the model's 1024. Got 2000"):
        Engine(model, dataclasses.replace(SMALL, max_context_len=2000))
