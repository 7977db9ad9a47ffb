"""Log-probabilities against NumPy's, ranks and the likeliest tokens included, in parts of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.serving.steps.logprobs import prompt_logprobs, token_logprobs

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
    found = token_logprobs(jnp.asarray(logits), jnp.asarray(tokens), jnp.ones(30, bool), top=5)
    for place in range(30):
        assert_right(found, logits, tokens, place, count)


def test_token_logprobs_of_masked_logits_are_minus_infinity():
    found = token_logprobs(jnp.array([[0.0, -jnp.inf]]), jnp.array([1], jnp.int32), jnp.array([True]), top=2)
    assert found.at(0, 1, 2)[1].logprob == -np.inf


@pytest.mark.parametrize("rows_at_once", [1, 4, 5, 12, 100])
def test_prompt_logprobs_do_not_depend_on_the_parts(rows_at_once):
    """The model's logits are its hidden states; the places not asked for may hold anything."""
    logits = random_logits((12, 40))
    next_ids = np.random.default_rng(2).integers(0, 40, 12).astype(np.int32)
    wanted = np.array([0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 0, 1], bool)
    sizes = []

    def compute_logits(hidden):
        sizes.append(hidden.shape[0])
        return hidden

    found = prompt_logprobs(
        compute_logits,
        jnp.asarray(logits),
        jnp.asarray(next_ids),
        jnp.asarray(wanted),
        top=3,
        rows_at_once=rows_at_once,
    )
    assert set(sizes) == {min(rows_at_once, 12)}
    for place in np.flatnonzero(wanted):
        assert_right(found, logits, next_ids, place, 3)


def test_prompt_logprobs_hold_the_logits_of_few_rows():
    """1024 rows of 50,000 logits would be 205 MB."""

    def step(hidden, head, next_ids, wanted):
        return prompt_logprobs(lambda rows: rows @ head, hidden, next_ids, wanted, top=3, rows_at_once=32)

    shapes = [((1024, 8), jnp.float32), ((8, 50_000), jnp.float32), ((1024,), jnp.int32), ((1024,), jnp.bool_)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    memory = jax.jit(step).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 10 * 32 * 50_000 * 4
