"""The serving loop: same tokens in a crowd as alone, no compilation, no page lost, whatever interrupts it."""

import dataclasses
import functools
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
from jattn.serving.engine import Engine
from jattn.serving.executor import executor as executor_module
from jattn.serving.executor import launch, pool_memory, state
from jattn.serving.request import SamplingParams
from tests.jattn.harness import one_pass, tiny
from tests.jattn.harness.compile_log import compilations
from tests.jattn.harness.tiny import CONFIG, VOCAB, run, sampled
from tests.often import often, slow

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture
def engine():
    return tiny.tiny_engine()


@functools.cache
def engine_of_several_buckets():
    """Tests share it, and leave it idle."""
    buckets = {"smallest_decode_bucket": 2, "smallest_prefill_bucket": 8, "prefill_seqs": 2}
    return Engine(tiny.tiny_model(), dataclasses.replace(CONFIG, **buckets, full_sampling=False))


def random_prompts(count, longest, seed=0, vocab_size=VOCAB):
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def best_gap(tokens):
    """How far the best logit after `tokens` is ahead of the second best."""
    logits = one_pass.logits(tiny.tiny_model(), tokens, context=CONFIG.max_context_len, page_size=CONFIG.page_size)
    second, best = np.sort(logits[-1])[-2:]
    return best - second


def assert_same_up_to_ties(prompt, tokens, expected):
    for i, (token, wanted) in enumerate(zip(tokens, expected, strict=True)):
        if token != wanted:
            assert best_gap(prompt + expected[:i]) < 1e-4, f"token {i}: {token} != {wanted}"
            return


def test_crowd_with_preemption_gives_each_request_its_tokens_alone():
    """Alone in smaller buckets, whose products round otherwise."""
    engine = engine_of_several_buckets()
    prompts = random_prompts(24, longest=40)
    crowd = [
        engine.make_request(prompt, dataclasses.replace(GREEDY, max_tokens=1 + i % 20))
        for i, prompt in enumerate(prompts)
    ]
    together = run(engine, crowd)
    assert any(request.num_preemptions for request in crowd)
    for prompt, request, tokens in zip(prompts, crowd, together, strict=True):
        (alone,) = run(engine, [engine.make_request(prompt, request.params)])
        assert len(tokens) == request.params.max_tokens
        assert_same_up_to_ties(prompt, tokens, alone)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=12, top_k=50, top_p=0.9, seed=7)])
def test_crowd_in_one_bucket_gives_exactly_the_tokens_alone(engine, params):
    prompts = random_prompts(8, longest=40, seed=1)
    together = run(engine, [engine.make_request(prompt, params) for prompt in prompts])
    alone = [run(engine, [engine.make_request(prompt, params)])[0] for prompt in prompts]
    assert together == alone
    if params.temperature:
        (other,) = run(engine, [engine.make_request(prompts[0], dataclasses.replace(params, seed=8))])
        assert other != alone[0]


@pytest.fixture(scope="module")
def bundled():
    """Its text depends on every key, as that of random weights does not."""
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    checkpoint = Checkpoint(point.load()())
    return model_class(checkpoint.architecture).from_checkpoint(checkpoint, dtype=jnp.float32)


@pytest.mark.parametrize("backend", ["paged", slow("flashinfer")])
def test_text_over_fp8_pages_does_not_depend_on_where_its_prompt_is_cut(bundled, backend):
    texts = []
    for prefill_tokens in (96, 8):
        facts = {"backend": backend, "kv_cache_dtype": "fp8_e5m2", "full_sampling": False, "max_context_len": 128}
        sizes = {
            "num_pages": 24,
            "page_size": 8,
            "max_num_seqs": 8,
            "prefill_tokens": prefill_tokens,
            "smallest_prefill_bucket": 96,
        }
        with tiny.one_variant("greedy"):
            engine = Engine(bundled, dataclasses.replace(CONFIG, **facts, **sizes))
            prompts = random_prompts(3, 90, seed=3, vocab_size=bundled.vocab_size)
            params = dataclasses.replace(GREEDY, max_tokens=16)
            texts.append(run(engine, [engine.make_request(prompt, params) for prompt in prompts]))
    assert texts[0] == texts[1]


def test_stop_token_ends_a_request_and_is_its_last(engine):
    (prompt,) = random_prompts(1, longest=20, seed=3)
    (free,) = run(engine, [engine.make_request(prompt, sampled(1, 20))])
    stop = free[10]
    request = engine.make_request(prompt, dataclasses.replace(sampled(1, 20), stop_token_ids=(stop,)))
    (stopped,) = run(engine, [request])
    assert stopped == free[: free.index(stop) + 1]
    assert request.finish_reason == "stop"


def test_events_of_a_step_belong_to_launches_before_it(engine):
    engine.add(engine.make_request([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=3)))
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


@pytest.mark.parametrize("calls", [1, slow(2), slow(9), 30])
def test_interrupted_launch_loses_no_request(engine, monkeypatch, calls):
    prompts = random_prompts(12, longest=40, seed=7)
    expected = run(engine, [engine.make_request(prompt, GREEDY) for prompt in prompts])
    requests = [engine.make_request(prompt, GREEDY) for prompt in prompts]
    monkeypatch.setattr(engine.executor, "compiled_steps", interrupt_after(engine.executor.compiled_steps, calls))
    with pytest.raises(KeyboardInterrupt):
        run(engine, requests)
    run(engine, [])
    assert [request.generated for request in requests] == expected
    assert all(request.finish_reason == "length" for request in requests)


@pytest.mark.parametrize("seed", often(range(8), range(3)))
def test_interrupts_at_random_lines_lose_no_request(engine, seed):
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

    prompts = random_prompts(12, longest=30, seed=seed)
    expected = run(engine, [engine.make_request(prompt, GREEDY) for prompt in prompts])
    requests = [engine.make_request(prompt, GREEDY) for prompt in prompts]
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
    assert [request.generated for request in requests] == expected


def test_rows_are_sent_to_decodes_only_when_a_page_opens(engine, monkeypatch):
    sent, steps = [], engine.executor.compiled_steps

    def call(step, *arguments):
        sent.append(arguments[-1])
        return steps(step, *arguments)

    monkeypatch.setattr(engine.executor, "compiled_steps", call)
    run(engine, [engine.make_request([1], dataclasses.replace(GREEDY, max_tokens=24))])
    decodes = sent[1:]
    assert len(decodes) >= 23
    assert len({id(plan) for plan in decodes}) <= 2 + 24 // CONFIG.page_size


def test_transfer_that_fails_is_made_again(engine, monkeypatch):
    (expected,) = run(engine, [engine.make_request([1, 2], GREEDY)])
    fresh = tiny.with_steps_of(engine)  # which gives the request the same row and pages again
    request = fresh.make_request([1, 2], GREEDY)
    put, sent = jax.device_put, []

    def put_first_in_vain(array, *_):
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


def test_abort_amid_a_step_waits_for_its_end(engine, monkeypatch):
    requests = [engine.make_request(prompt, GREEDY) for prompt in random_prompts(3, 20, seed=8)]
    monkeypatch.setattr(engine.scheduler, "must_preempt", lambda: engine.abort(requests[0]))
    for request in requests:
        engine.add(request)
    engine.step()
    assert [request.finish_reason for request in requests] == ["abort", None, None]
    monkeypatch.undo()
    run(engine, [])


@pytest.mark.parametrize(("num_pages", "page_size"), [(10**9, 16), (10**18, 16), (2, 10**9)])
def test_pool_beyond_the_memory_is_refused(num_pages, page_size):
    with pytest.raises(ValueError, match=rf"pool needs \d+ bytes, .* Got num_pages={num_pages}, page_size={page_size}"):
        Engine(tiny.tiny_model(), dataclasses.replace(CONFIG, num_pages=num_pages, page_size=page_size))


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        (pool_memory, "make_pool", r"pool needs \d+ bytes, .* Got num_pages=17"),
        (state, "empty_state", r"^`max_num_seqs` or `max_context_len` must be lower: .* Got max_num_seqs="),
    ],
)
def test_what_the_allocator_refuses_is_refused(monkeypatch, module, name, said):
    def exhausted(*arguments, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(module, name, exhausted)
    with pytest.raises(ValueError, match=said):
        Engine(tiny.tiny_model(), CONFIG)


def test_context_end_stops_a_request(engine):
    request = engine.make_request([5] * 56, dataclasses.replace(GREEDY, max_tokens=1000))
    (tokens,) = run(engine, [request])
    assert len(tokens) == 8
    assert request.finish_reason == "length"


def test_abort_at_any_stage_frees_its_pages(engine):
    prompts = random_prompts(12, longest=40, seed=4)
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


def test_no_compilation_in_200_steps_of_changing_batches():
    engine, rng = engine_of_several_buckets(), random.Random(5)
    prompts = iter(random_prompts(400, longest=40, seed=5))
    with compilations() as events:
        for _ in range(200):
            while rng.random() < 0.3:
                params = SamplingParams(max_tokens=rng.randint(1, 20), temperature=rng.choice([0.0, 0.8]))
                engine.add(engine.make_request(next(prompts), params))
            engine.step()
        run(engine)
    assert events == []


@pytest.mark.parametrize("step", [("decode", 4, "greedy"), ("prefill", 16, "plain")])
def test_temporary_memory_does_not_grow_with_the_pool(engine, step):
    small = engine.executor.compiled_steps[step].memory_analysis()
    plan = tiny.plans_of(dataclasses.replace(CONFIG, num_pages=2**14)).executor.compiled_steps[step]
    large = jax.jit(plan.function, donate_argnums=plan.donate).lower(*plan.arguments).compile().memory_analysis()
    assert large.alias_size_in_bytes > 10 * 2**20 > small.alias_size_in_bytes
    assert large.temp_size_in_bytes <= 1.01 * small.temp_size_in_bytes


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ([], GREEDY, "A prompt must have at least one token"),
        ([1] * 64, GREEDY, r"room for a token in the context of 64 tokens. Got a prompt of 64"),
        ([1, VOCAB], GREEDY, r"below 512. Got 512"),
        ([1, -1], GREEDY, r"at least 0 and below 512. Got -1"),
        ([1, 1.5], GREEDY, r"Token ids must be whole numbers at least 0 and below 512. Got 1.5"),
        (["a"], GREEDY, r"Token ids must be whole numbers .* Got 'a'"),
        (b"abc", GREEDY, r"Token ids must be whole numbers .* Got b'abc'"),
        (5, GREEDY, r"Token ids must be whole numbers .* Got 5"),
        ([1], dataclasses.replace(GREEDY, stop_token_ids=(1, 2)), "may have 1 stop tokens"),
    ],
)
def test_request_that_cannot_be_served_is_refused(engine, prompt, params, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine.make_request(prompt, params)
    assert not engine.has_work


def test_request_larger_than_the_pool_is_refused():
    engine = tiny.plans_of(dataclasses.replace(CONFIG, num_pages=5))
    with pytest.raises(ValueError, match=r"needs 8 pages of 4; the pool has 4"):
        engine.make_request([1] * 20, GREEDY)
