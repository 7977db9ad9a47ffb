"""Decode steps that verify drafted tokens, on the bundled checkpoint: the text of plain decode, in fewer steps."""

import dataclasses
import functools
import random
from importlib.metadata import entry_points

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.checkpoint import Checkpoint
from jattn.model import model_class
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.frontend.text import Tokenizer
from jattn.serving.request import SamplingParams
from jattn.serving.steps.draft_model import DraftModel
from jattn.serving.steps.drafting import NgramDrafting
from jattn.serving.steps.sampler import SamplingState, sample
from tests.careful import compiled_with_care
from tests.jattn.harness import one_pass
from tests.jattn.harness.prompt_lookup import counted, prompt_lookup
from tests.jattn.harness.tiny import one_variant, run
from tests.often import slow

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PLAIN = EngineConfig(
    num_pages=40,
    page_size=8,
    max_num_seqs=8,
    max_context_len=192,
    prefill_tokens=64,
    smallest_prefill_bucket=64,
    full_sampling=False,
)
NGRAM = NgramDrafting(num_draft_tokens=4)
DRAFT = DraftModel(num_layers=3, num_draft_tokens=2)
REPETITIVE = "x = [1, 2, 3, 4, 5]\n" * 4
TEXTS = (
    REPETITIVE,
    'def read_lines(path, encoding="utf-8"):\n    """',
    "class Node:\n    def __init__(self, left, right):\n        self.left = left\n",
    "import os\nimport sys\n\n\nclass Parser:\n    def __init__(self",
)


@functools.cache
def checkpoint():
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    return Checkpoint(point.load()())


@functools.cache
def bundled(dtype="float32"):
    return model_class(checkpoint().architecture).from_checkpoint(checkpoint(), dtype=jnp.dtype(dtype))


@functools.cache
def draft_model():
    return DRAFT.load(checkpoint(), dtype=jnp.float32)


def logits(model, text):
    return one_pass.logits(model, text, context=PLAIN.max_context_len, page_size=PLAIN.page_size)


def encode(text):
    return Tokenizer(checkpoint().path).encode(text)


@functools.cache
def engine_of(name):
    drafter = {"plain": None, "ngram": NGRAM, "draft_model": DRAFT}[name]
    with compiled_with_care(), one_variant("plain"):
        return Engine(
            bundled(),
            dataclasses.replace(PLAIN, speculative=drafter),
            draft_model=draft_model() if drafter is DRAFT else None,
        )


@pytest.fixture(autouse=True)
def variant():
    """The one that draws; the tests that compile engines of their own have the other one."""
    with one_variant("plain"):
        yield


# Prompt lookup is in the slow tests; of the default ones test_drafting, test_speculative_rules, test_gpt_oss have it.
@pytest.fixture(params=[slow("ngram"), "draft_model"])
def engine(request):
    return engine_of(request.param)


def mixed_prompts():
    """Code, which repeats, and tokens at random, which do not; some longer than a prefill launch."""
    rng = random.Random(0)
    at_random = [[rng.randrange(2048) for _ in range(length)] for length in (1, 2, 70, 33, 90, 8, 15, 60)]
    return [*map(encode, TEXTS), *at_random]


@functools.cache
def expected_of_mixed_prompts():
    """What plain decode writes after each of them, greedily."""
    prompts = mixed_prompts()
    return [request.generated for request in served(engine_of("plain"), prompts, [GREEDY] * len(prompts))]


def served(engine, prompts, params):
    requests = [engine.make_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    run(engine, requests)
    return requests


def outcome(request):
    return request.generated, request.finish_reason


SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.4, "seed": 1},
    "filtered": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 2},
}


@functools.cache
def crowd(name, sampling):
    """What an engine writes for more requests than its pool holds."""
    prompts = mixed_prompts()
    params = [SamplingParams(max_tokens=5 + 5 * i, ignore_eos=True, **SAMPLING[sampling]) for i in range(len(prompts))]
    return served(engine_of(name), prompts, params)


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        slow("ngram", "filtered"),
        ("draft_model", "filtered"),
        slow("ngram", "greedy"),
        slow("draft_model", "greedy"),
        slow("ngram", "sampled"),
        slow("draft_model", "sampled"),
    ],
)
def test_crowd_with_preemption_has_the_text_of_plain_decode(drafter, sampling):
    found = crowd(drafter, sampling)
    assert list(map(outcome, found)) == list(map(outcome, crowd("plain", sampling)))
    assert any(request.num_preemptions for request in found)
    assert sum(request.drafts.accepted for request in found)


@pytest.mark.slow
def test_repetitive_text_comes_several_tokens_a_step():
    (request,) = served(engine_of("ngram"), [encode(REPETITIVE)], [dataclasses.replace(GREEDY, max_tokens=100)])
    assert request.drafts.tokens_per_step > 2
    assert request.drafts.acceptance_rate > 0.4


@functools.cache
def repetitive():
    """What plain decode writes after REPETITIVE up to the context's end."""
    prompt = encode(REPETITIVE)
    (request,) = served(engine_of("plain"), [prompt], [dataclasses.replace(GREEDY, max_tokens=PLAIN.max_context_len)])
    assert len(prompt) + len(request.generated) == PLAIN.max_context_len
    return prompt, request.generated


def test_stop_token_in_an_accepted_run_is_the_last(engine):
    """Each token of the text in turn is the stop token; most of them come amid a run."""
    prompt, free = repetitive()
    free = free[: GREEDY.max_tokens]
    stops = list(dict.fromkeys(free))
    params = [dataclasses.replace(GREEDY, stop_token_ids=(stop,)) for stop in stops]
    found = served(engine, [prompt] * len(stops), params)
    for stop, request in zip(stops, found, strict=True):
        assert request.generated == free[: free.index(stop) + 1]
        assert request.finish_reason == "stop"


def test_max_tokens_and_the_contexts_end_cut_a_run(engine):
    prompt, free = repetitive()
    lengths = [*range(1, 8), 192]
    found = served(engine, [prompt] * len(lengths), [dataclasses.replace(GREEDY, max_tokens=n) for n in lengths])
    for length, request in zip(lengths, found, strict=True):
        assert request.generated == free[:length]
        assert request.finish_reason == "length"


def test_abort_at_any_stage_frees_its_pages_and_harms_no_neighbour(engine):
    prompts, expected = mixed_prompts(), expected_of_mixed_prompts()
    for steps in (1, 3, 6):
        requests = [engine.make_request(prompt, GREEDY) for prompt in prompts]
        for request in requests:
            engine.add(request)
        for _ in range(steps):
            engine.step()
        for request in requests[::2]:
            engine.abort(request)
            assert not request.pages
        run(engine)
        assert [request.generated for request in requests[1::2]] == expected[1::2]
        for request, tokens in zip(requests[::2], expected[::2], strict=True):
            assert request.generated == tokens[: len(request.generated)]


@pytest.mark.parametrize(("drafter", "calls"), [slow("ngram", 2), ("draft_model", 9)])
def test_interrupted_launch_loses_no_request(drafter, monkeypatch, calls):
    engine = engine_of(drafter)
    prompts, expected = mixed_prompts(), expected_of_mixed_prompts()
    steps = engine.executor.compiled_steps

    def interrupted(*arguments):
        nonlocal calls
        results = steps(*arguments)
        calls -= 1
        if calls == 0:
            raise KeyboardInterrupt
        return results

    monkeypatch.setattr(engine.executor, "compiled_steps", interrupted)
    requests = [engine.make_request(prompt, GREEDY) for prompt in prompts]
    with pytest.raises(KeyboardInterrupt):
        run(engine, requests)
    run(engine)
    assert [request.generated for request in requests] == expected


def test_checked_launches_pass(engine, monkeypatch):
    prompts, expected = mixed_prompts(), expected_of_mixed_prompts()
    monkeypatch.setattr(engine.executor, "config", dataclasses.replace(engine.config, debug_checks=True))
    found = served(engine, prompts, [GREEDY] * len(prompts))
    assert [request.generated for request in found] == expected


def test_no_compilation_in_60_steps_of_changing_batches(engine):
    rng, prompts, compilations = random.Random(5), mixed_prompts(), []

    def count(event, duration, **_):
        if "compile" in event:
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for _ in range(60):
            while rng.random() < 0.5:
                params = SamplingParams(max_tokens=rng.randint(1, 20), temperature=rng.choice([0.0, 0.8]))
                engine.add(engine.make_request(rng.choice(prompts), params))
            engine.step()
        run(engine)
        assert not compilations
        jax.jit(lambda x: x + 1)(jnp.zeros(3))
        assert compilations, "the listener must see a compilation when there is one"
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [1, 2, 60])
def test_counts_of_prompt_lookup_are_those_of_a_hand_count(max_tokens):
    for prompt in mixed_prompts()[:6]:
        (request,) = served(engine_of("ngram"), [prompt], [dataclasses.replace(GREEDY, max_tokens=max_tokens)])
        assert request.drafts == counted(prompt, request.generated, prompt_lookup)


@pytest.mark.parametrize("temperature", [0.0, slow(0.5)])
def test_counts_of_a_draft_model_are_those_of_a_pass_over_the_whole_text(temperature):
    """So its keys are right, whatever was accepted or rejected before, and it draws with the served model's noise."""
    params = dataclasses.replace(GREEDY, max_tokens=80, temperature=temperature, seed=5)
    for prompt in map(encode, TEXTS[:2]):
        (request,) = served(engine_of("draft_model"), [prompt], [params])
        # Past the first wrong one it does not matter what is proposed: up to it, the proposal is the text itself.
        guesses = chosen_after_each(logits(draft_model(), request.tokens), params)
        guesses += [-1] * DRAFT.num_draft_tokens

        def propose(text, guesses=guesses):
            return guesses[len(text) - 1 :][: DRAFT.num_draft_tokens]

        assert request.drafts == counted(prompt, request.generated, propose)
        assert 0 < request.drafts.accepted < request.drafts.drafted


drawn = jax.jit(functools.partial(sample, greedy_only=False))


def chosen_after_each(logits, params):
    """The token drawn at each place, as of requests that stand there."""
    alike = functools.partial(jnp.full, PLAIN.max_context_len)
    sampling = SamplingState(
        temperature=alike(params.temperature, jnp.float32),
        top_k=alike(params.top_k, jnp.int32),
        top_p=alike(params.top_p, jnp.float32),
        min_p=alike(params.min_p, jnp.float32),
        seed=alike(params.seed, jnp.uint32),
    )
    padded = jnp.zeros((PLAIN.max_context_len, logits.shape[1]), jnp.float32).at[: len(logits)].set(logits)
    return drawn(padded, sampling, jnp.arange(1, PLAIN.max_context_len + 1, dtype=jnp.int32)).tolist()


def texts(prompts, drafter, dtype=jnp.float32, **fields):
    """Greedy texts of an engine that compiles for them alone."""
    config = dataclasses.replace(PLAIN, speculative=drafter, dtype=jnp.dtype(dtype).name, **fields)
    draft = DRAFT.load(checkpoint(), dtype=dtype) if drafter is DRAFT else None
    engine = Engine(bundled(config.dtype), config, draft_model=draft)
    requests = served(engine, prompts, [GREEDY] * len(prompts))
    assert drafter is None or sum(request.drafts.accepted for request in requests)
    return [request.generated for request in requests]


# Engines of their own, which take seconds to compile.


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [NGRAM, DRAFT], ids=["ngram", "draft_model"])
def test_bfloat16_text_differs_only_where_two_tokens_are_as_good(drafter):
    """As good: nearer to the best than twice the error of a bfloat16 logit, measured against float32."""
    prompts = mixed_prompts()
    plain = texts(prompts, None, jnp.bfloat16)
    for prompt, expected, found in zip(prompts, plain, texts(prompts, drafter, jnp.bfloat16), strict=True):
        differing = [i for i, pair in enumerate(zip(expected, found, strict=True)) if len(set(pair)) > 1]
        if differing:
            place = differing[0]
            before = prompt + expected[:place]
            exact, rounded = (np.asarray(logits(bundled(name), before)) for name in ("float32", "bfloat16"))
            both = rounded[-1][[expected[place], found[place]]]
            assert np.max(rounded[-1]) - np.min(both) < 2 * np.max(np.abs(rounded - exact))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [DRAFT, NGRAM], ids=["draft_model", "ngram"])
def test_text_over_fp8_pages_is_that_of_plain_decode_over_them(drafter):
    """Whoever writes a token's key, a verification or a decode, rounds it the same."""
    prompts, fields = list(map(encode, TEXTS)), {"kv_cache_dtype": "fp8_e4m3", "num_pages": 24}
    assert texts(prompts, drafter, **fields) == texts(prompts, None, **fields)
