"""Log-probabilities against NumPy's, ranks and the likeliest tokens included."""

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.serving.steps.logprobs import token_logprobs

# A sum of V terms in float32, and one logarithm and two subtractions of numbers below 2**5.
TOLERANCE = 40 * 2**-23 * 2**5


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def assert_right(found, logits, tokens, place, count):
    """Of one place: the token first, then the likeliest in order."""
    expected = log_softmax(logits[place])
    order = np.argsort(-logits[place], kind="stable").tolist()
    of_place = found.at(place, int(tokens[place]), count)
    assert next(iter(of_place)) == tokens[place]
    assert list(of_place) == list(dict.fromkeys([int(tokens[place]), *order[:count]]))
    for token, logprob in of_place.items():
        assert logprob.rank == order.index(token) + 1
        assert abs(logprob.logprob - expected[token]) < TOLERANCE


def random_logits(shape):
    """Rounded to quarters: many are equal."""
    return np.round(np.random.default_rng(0).normal(0, 4, shape) * 4).astype(np.float32) / 4


@pytest.mark.parametrize("count", [0, 1, 5])
def test_token_logprobs_are_numpys(count):
    logits = random_logits((30, 40))
    tokens = np.random.default_rng(1).integers(0, 40, 30).astype(np.int32)
    found = token_logprobs(jnp.asarray(logits), jnp.asarray(tokens), top=5)
    for place in range(30):
        assert_right(found, logits, tokens, place, count)


def test_token_logprobs_of_masked_logits_are_minus_infinity():
    found = token_logprobs(jnp.array([[0.0, -jnp.inf]]), jnp.array([1], jnp.int32), top=2)
    assert found.at(0, 1, 2)[1].logprob == -np.inf


@pytest.mark.parametrize("top", [0, 1, 5])
def test_token_logprobs_of_a_large_vocabulary_are_numpys(top):
    """Of these so many are equal that parts of the vocabulary are too; and the last part is not full."""
    logits = np.minimum(random_logits((6, 2000)), 5)
    logits[0] = 1.0
    logits[1, :1999] = -np.inf
    tokens = np.array([1999, 1999, 0, 1, 128, 700], np.int32)
    found = token_logprobs(jnp.asarray(logits), jnp.asarray(tokens), top=top)
    for place in range(6):
        assert_right(found, logits, tokens, place, top if place != 1 else min(top, 1))


def test_token_logprobs_of_minus_infinity_are_of_tokens_that_there_are():
    logits = np.full((1, 2000), -np.inf, np.float32)
    logits[0, 1998] = 0.0
    found = token_logprobs(jnp.asarray(logits), jnp.array([1998], jnp.int32), top=5)
    assert found.top_ids.tolist() == [[1998, 0, 1, 2, 3]]
