"""What requests ask of their logits, through the serving loop: the host recounts it from the model's own logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.serving.request import SamplingParams
from tests.jattn.harness.recount import CONTEXT, expected_tokens, model_logits
from tests.jattn.harness.tiny import CONFIG, VOCAB, plans_of, run, tiny_engine


@pytest.fixture
def engine():
    return tiny_engine()


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def random_prompt(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


# Greedy, the tiny model repeats nothing, so each rule alone is one that rewards what was seen.
BASE = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
ASKED = {
    "plain": {},
    "repetition": {"repetition_penalty": 0.5},
    "frequency": {"frequency_penalty": -0.4},
    "presence": {"presence_penalty": -1.0},
    "bias": {"logit_bias": {5: 0.5, 77: 0.7, 300: -2.0}},
    "allowed": {"allowed_token_ids": (5, 77, 300, 4), "logit_bias": {77: -0.4, 9: 50.0}, "presence_penalty": 0.2},
    "min_p": {"temperature": 1.0, "min_p": 0.3, "seed": 3},
    "all": {
        "temperature": 0.7,
        "seed": 9,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {1: 0.4},
        "logprobs": 3,
        "prompt_logprobs": 2,
    },
}


@functools.cache
def asked(name):
    """A request of that kind and its tokens; the prompts are longer than a prefill launch, or not."""
    number = list(ASKED).index(name)
    prompt = random_prompt(number, 5 + 5 * number)
    params = dataclasses.replace(BASE, **ASKED[name])
    return prompt, params, expected_tokens(prompt, params)


@pytest.mark.parametrize("name", ASKED)
def test_request_alone_follows_its_rules(engine, name):
    prompt, params, expected = asked(name)
    assert run(engine, [engine.make_request(prompt, params)]) == [expected]


def test_rules_change_the_tokens(engine):
    for name in ("repetition", "frequency", "presence", "bias"):
        prompt, _, expected = asked(name)
        assert expected_tokens(prompt, BASE) != expected


def test_crowd_with_preemption_follows_each_ones_rules(engine):
    """Rows change hands between requests with rules and without, and preemption rebuilds the histories."""
    requests = [engine.make_request(*asked(name)[:2]) for name in [*ASKED, *reversed(ASKED)]]
    tokens = run(engine, requests)
    assert sum(request.num_preemptions for request in requests)
    assert tokens == [asked(name)[2] for name in [*ASKED, *reversed(ASKED)]]


def test_no_variant_of_a_step_compiles_once_it_runs(engine):
    requests = [engine.make_request(*asked(name)[:2]) for name in ASKED]
    compilations = []

    def count(event, duration, **_):
        if "compile" in event:
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        run(engine, requests)
        assert not compilations
        jax.jit(lambda x: x + 1)(jnp.zeros(3))
        assert compilations, "the listener must see a compilation when there is one"
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def test_interrupted_launch_rebuilds_the_histories(engine, monkeypatch):
    requests = [engine.make_request(*asked(name)[:2]) for name in ASKED]
    steps, calls = engine.executor.compiled_steps, 0

    def interrupted(*arguments):
        nonlocal calls
        results = steps(*arguments)
        calls += 1
        if calls in (9, 14):
            raise KeyboardInterrupt
        return results

    monkeypatch.setattr(engine.executor, "compiled_steps", interrupted)
    for request in requests:
        engine.add(request)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    run(engine)
    assert [request.generated for request in requests] == [asked(name)[2] for name in ASKED]
    assert_logprobs(requests[list(ASKED).index("all")])


def assert_logprobs(request):
    """Against the model's log-softmax; it differs by the rounding of two float32 passes of other shapes."""
    params, tokens = request.params, request.tokens
    logprobs = log_softmax(model_logits(tokens))
    assert len(request.logprobs) == len(request.generated)
    assert sorted(request.prompt_logprobs) == list(range(1, len(request.prompt)))
    places = [*request.prompt_logprobs.items(), *enumerate(request.logprobs, len(request.prompt))]
    for place, found in places:
        count = params.prompt_logprobs if place < len(request.prompt) else params.logprobs
        expected = logprobs[place - 1]
        order = np.argsort(-expected, kind="stable").tolist()
        assert next(iter(found)) == tokens[place]
        assert set(found) == {tokens[place], *order[:count]}
        for token, logprob in found.items():
            assert logprob.rank == order.index(token) + 1
            np.testing.assert_allclose(logprob.logprob, expected[token], atol=2e-5)


@pytest.mark.parametrize("asked_for", [{"logprobs": 0}, {"logprobs": 20}, {"prompt_logprobs": 4}])
@pytest.mark.parametrize("prompt_len", [1, 17, 40])
def test_logprobs_are_the_models_own(engine, asked_for, prompt_len):
    """Raw ones, whatever the rules; the prompt in one launch or several."""
    request = engine.make_request(
        random_prompt(prompt_len, prompt_len),
        dataclasses.replace(BASE, **{"logprobs": 1, "prompt_logprobs": 0} | asked_for, repetition_penalty=2.0),
    )
    run(engine, [request])
    assert_logprobs(request)


def test_request_that_asks_for_no_logprobs_has_none(engine):
    with_some = engine.make_request(random_prompt(0, 5), dataclasses.replace(BASE, logprobs=2))
    without = engine.make_request(random_prompt(1, 5), dataclasses.replace(BASE, presence_penalty=0.1))
    events = []
    for request in (with_some, without):
        engine.add(request)
    while engine.has_work:
        events += engine.step()
    assert [event.logprobs for event in events if event.request is with_some] == with_some.logprobs
    assert not any(event.logprobs for event in events if event.request is without)
    assert len(with_some.logprobs) == BASE.max_tokens
    assert (without.logprobs, without.prompt_logprobs, with_some.prompt_logprobs) == ([], {}, {})


@pytest.mark.parametrize("min_tokens", [0, 1, 5, 14])
def test_no_stop_token_comes_before_min_tokens(engine, min_tokens):
    """The stop token has such a bias that it comes as soon as it may."""
    stop = 42
    params = dataclasses.replace(BASE, stop_token_ids=(stop,), min_tokens=min_tokens, logit_bias={stop: 1000})
    request = engine.make_request(random_prompt(3, 9), params)
    (tokens,) = run(engine, [request])
    assert stop not in tokens[:min_tokens]
    assert len(tokens) == min(min_tokens + 1, 14)
    assert request.finish_reason == ("stop" if min_tokens < 14 else "length")


def test_min_tokens_of_any_size_fill_the_context(engine):
    """A request without `max_tokens` may ask for more than the device's integers hold."""
    stop = 42
    params = dataclasses.replace(
        BASE, max_tokens=None, min_tokens=2**40, stop_token_ids=(stop,), logit_bias={stop: 1000}
    )
    prompt = random_prompt(3, CONTEXT - 4)
    request = engine.make_request(prompt, params)
    (tokens,) = run(engine, [request])
    assert (len(prompt) + len(tokens), request.finish_reason) == (CONTEXT, "length")
    assert stop not in tokens


def test_request_without_a_number_of_tokens_goes_to_the_contexts_end(engine):
    assert engine.make_request([1, 2], dataclasses.replace(BASE, max_tokens=None)).limit == CONTEXT


@pytest.mark.parametrize(
    ("asked_for", "sentence"),
    [
        ({"logprobs": 21}, "`logprobs` must be at most 20. Got 21"),
        ({"prompt_logprobs": 21}, "`prompt_logprobs` must be at most 20. Got 21"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "`logit_bias` must have at most 300 tokens. Got 301"),
        ({"logprobs": -1}, f"`logprobs` must be at most 20. Got {VOCAB}"),
        ({"allowed_token_ids": range(301)}, "`allowed_token_ids` must have at most 300 tokens. Got 301"),
        ({"allowed_token_ids": (VOCAB,)}, f"`allowed_token_ids` must be .* below {VOCAB}. Got {VOCAB}"),
        ({"bad_words": "a"}, "`bad_words` need a tokenizer"),
        ({"logit_bias": {VOCAB: 1}}, f"token ids of `logit_bias` must be .* below {VOCAB}. Got {VOCAB}"),
    ],
)
def test_request_beyond_the_bounds_is_refused(engine, asked_for, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine.make_request([1, 2], dataclasses.replace(BASE, **asked_for))
    assert not engine.has_work


@pytest.fixture
def small_engine():
    return plans_of(dataclasses.replace(CONFIG, full_sampling=False))


def test_engine_without_full_sampling_compiles_and_holds_none_of_it(small_engine):
    assert {key[2] for key in small_engine.executor.compiled_steps} == {"greedy", "plain"}
    assert max(leaf.size for leaf in jax.tree.leaves(small_engine.executor.state)) < VOCAB


@pytest.mark.parametrize("name", ["repetition", "frequency", "presence", "bias", "all"])
def test_engine_without_full_sampling_refuses_what_needs_it(small_engine, name):
    prompt, params, _ = asked(name)
    with pytest.raises(ValueError, match=r"need an engine with `full_sampling`. Got full_sampling=False"):
        small_engine.make_request(prompt, params)


def test_full_step_updates_the_history_in_place(engine):
    """The donated arrays alias what comes out: no copy of rows x vocabulary a step."""
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.executor.state))
    history_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.executor.state.history))
    memory = engine.executor.compiled_steps["decode", 4, "full"].memory_analysis()
    assert history_bytes > 0.9 * (state_bytes - engine.executor.state.rules.bias.nbytes * 2)
    assert memory.alias_size_in_bytes >= state_bytes
