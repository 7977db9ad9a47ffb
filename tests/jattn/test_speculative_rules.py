"""Requests that change their logits, ask for log-probabilities or break, under drafting: as under plain decode."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.serving.request import SamplingParams
from tests.jattn.harness.tiny import VOCAB, drafting_engine, one_variant, run, sampled, tiny_engine

# Rewards what was seen, so that greedy text repeats itself and drafted runs are accepted.
REPEATING = SamplingParams(max_tokens=30, temperature=0.0, frequency_penalty=-0.5)


def engines():
    """Of plain decode, and of drafts."""
    return tiny_engine(), drafting_engine()


@pytest.fixture(autouse=True)
def full_variant():
    """The one that serves every request."""
    with one_variant("full"):
        yield


def random_prompt(seed):
    return np.random.default_rng(seed).integers(0, VOCAB, 5 + seed).tolist()


ASKED = {
    "frequency": {},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
    "presence": {"presence_penalty": -1.0},
    "repetition": {"repetition_penalty": 0.6},
    "tiring": {"presence_penalty": -2.0, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {5: 0.7, 77: 0.5}},
    "allowed": {"allowed_token_ids": (5, 77, 300), "presence_penalty": 0.2},
    "sampled": {"temperature": 0.3, "seed": 3, "top_k": 50, "logprobs": 0},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (42,), "logit_bias": {42: 1000}},
    "plain": {"frequency_penalty": 0.0},
}


def served(engine):
    requests = [
        engine.make_request(random_prompt(i), dataclasses.replace(REPEATING, **asked))
        for i, asked in enumerate(ASKED.values())
    ]
    run(engine, requests)
    return dict(zip(ASKED, requests, strict=True))


def test_crowd_follows_each_ones_rules_as_in_plain_decode():
    """With preemption; each place of a drafted run counts the tokens before it."""
    expected, found = map(served, engines())
    assert {name: r.generated for name, r in found.items()} == {name: r.generated for name, r in expected.items()}
    assert any(request.num_preemptions for request in found.values())
    for name in ("frequency", "logprobs", "presence", "repetition", "tiring"):
        assert found[name].drafts.accepted > 5, name
    for name in ("logprobs", "sampled"):
        assert len(found[name].logprobs) == 30
        places = zip(found[name].logprobs, expected[name].logprobs, strict=True)
        assert_same_logprobs(
            [*places, *zip(*(r[name].prompt_logprobs.values() for r in (found, expected)), strict=True)]
        )


def assert_same_logprobs(places):
    for found, expected in places:
        assert [(token, logprob.rank) for token, logprob in found.items()] == [
            (token, logprob.rank) for token, logprob in expected.items()
        ]
        values = [[logprob.logprob for logprob in of.values()] for of in (found, expected)]
        np.testing.assert_allclose(*values, atol=2e-5)  # float32 passes of other shapes


@pytest.mark.parametrize("min_tokens", range(6))
def test_stop_token_amid_a_run_comes_no_earlier_than_it_may(min_tokens):
    """One token is so likely that runs of it are accepted; it is the stop token too."""
    params = SamplingParams(
        max_tokens=12, temperature=0.0, min_tokens=min_tokens, stop_token_ids=(42,), logit_bias={42: 1000, 7: 900}
    )
    _, engine = engines()
    request = engine.make_request([1, 7, 7, 7, 7], params)
    run(engine, [request])
    assert request.generated == [7] * min_tokens + [42]
    assert request.finish_reason == "stop"


def test_nan_logits_end_their_request_where_plain_decode_ends_it(monkeypatch):
    results = []
    prompt, params = [400, 401, 402], sampled(seed=9, max_tokens=10)
    neighbours = [([i, *range(i, 4 * i)], sampled(seed=i, max_tokens=10)) for i in (1, 2, 3)]
    for engine in engines():
        clean = engine.make_request(prompt, params)
        run(engine, [clean])
        weights = nnx.clone(engine.executor.weights)
        embedding = weights.vocabulary.embedding
        embedding[...] = embedding[...].at[clean.generated[2]].set(jnp.nan)
        monkeypatch.setattr(engine.executor, "weights", weights)
        requests = [engine.make_request(*each) for each in [*neighbours, (prompt, params)]]
        run(engine, requests)
        assert requests[-1].generated == clean.generated[:3]
        results.append([(request.generated, request.finish_reason, request.error) for request in requests])
    assert results[0] == results[1]
    assert [reason for _, reason, _ in results[0]] == ["length"] * 3 + ["error"]
