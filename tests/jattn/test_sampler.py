"""The sampler draws from the distribution that each row asks for, whatever the other rows are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.serving.steps.sampler import SamplingState, sample
from tests.often import slow

jitted = jax.jit(sample, static_argnames="greedy_only")


def rows(batch, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    """One row's parameters for all, or a list with one for each."""

    def column(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (batch,)))

    return SamplingState(
        temperature=column(temperature, np.float32),
        top_k=column(top_k, np.int32),
        top_p=column(top_p, np.float32),
        min_p=column(min_p, np.float32),
        seed=column(seed, np.uint32),
    )


def draw(logits, params, positions=None, *, greedy_only=False):
    logits = jnp.asarray(logits, jnp.float32)
    if positions is None:
        positions = jnp.arange(logits.shape[0], dtype=jnp.int32)
    return np.asarray(jitted(logits, params, jnp.asarray(positions, jnp.int32), greedy_only=greedy_only))


def draw_many(logits, n, **params):
    """`n` draws from one row of logits, at n positions."""
    return draw(np.broadcast_to(logits, (n, len(logits))), rows(n, **params))


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution in NumPy, float64; among equal logits the lower id is the likelier one."""
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < min_p] = 0
    order = np.argsort(-scaled, kind="stable")[: top_k or None]
    if top_p < 1:
        mass = np.cumsum(weights[order]) / weights[order].sum()
        order = order[: np.searchsorted(mass, top_p) + 1]
    kept = np.zeros(len(logits), bool)
    kept[order] = True
    weights = np.where(kept, weights, 0)
    return weights / weights.sum()


def random_logits(seed, shape, scale=2.0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


@pytest.mark.parametrize("greedy_only", [True, False])
def test_sample_greedy_is_argmax(greedy_only):
    logits = random_logits(0, (16, 50))
    tokens = draw(logits, rows(16, temperature=0, top_k=3, top_p=0.5), greedy_only=greedy_only)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    assert tokens.dtype == np.int32


def test_sample_greedy_takes_the_first_of_equal_logits():
    assert draw([[1.0, 3.0, 3.0, 0.0]], rows(1, temperature=0), greedy_only=True) == [1]
    assert draw([[-1.0, -0.0, 0.0, -1.0]], rows(1, top_k=1)) == [1]


def test_sample_greedy_only_compiles_no_randomness_and_no_filter():
    text = jitted.lower(jnp.zeros((2, 8)), rows(2), jnp.zeros(2, jnp.int32), greedy_only=True).as_text()
    assert "while" not in text
    assert "threefry" not in text


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-4])
def test_sample_low_temperature_is_greedy(temperature):
    logits = random_logits(1, (64, 50))
    np.testing.assert_array_equal(draw(logits, rows(64, temperature=temperature)), logits.argmax(-1))


def test_sample_high_temperature_is_uniform():
    counts = np.bincount(draw_many(random_logits(2, 8), 8000, temperature=3e38), minlength=8)
    assert chi_square(counts, np.full(8, 1 / 8)) < CHI_SQUARE_LIMIT[7]


def test_sample_top_k_1_is_greedy_even_among_equal_logits():
    logits = random_logits(3, (64, 50)).round()
    for temperature in (2.0, 3e38):
        np.testing.assert_array_equal(draw(logits, rows(64, temperature=temperature, top_k=1)), logits.argmax(-1))


def chi_square(counts, expected):
    expected = expected * counts.sum()
    seen = expected > 0
    assert not counts[~seen].any()
    return ((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum()


# By degrees of freedom, at 1e-4.
CHI_SQUARE_LIMIT = {3: 21.11, 5: 25.74, 7: 29.88, 11: 37.37}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 6},
        {"top_k": 100},
        {"top_p": 0.8},
        {"temperature": 1.5, "top_k": 8, "top_p": 0.9},
        {"min_p": 0.3},
        {"temperature": 1.5, "min_p": 0.2, "top_k": 6, "top_p": 0.9},
    ],
)
def test_sample_draws_from_the_distribution(params):
    logits = random_logits(4, 12, scale=1.0)
    expected = probabilities(logits, **params)
    counts = np.bincount(draw_many(logits, 20_000, seed=7, **params), minlength=12)
    freedom = np.count_nonzero(expected) - 1
    limit = CHI_SQUARE_LIMIT[min(f for f in CHI_SQUARE_LIMIT if f >= freedom)]
    assert chi_square(counts, expected) < limit


def test_sample_draws_from_the_distribution_over_seeds():
    logits = random_logits(5, 6, scale=1.0)
    n = 20_000
    params = rows(n, seed=np.arange(n))
    counts = np.bincount(draw(np.broadcast_to(logits, (n, 6)), params, np.full(n, 11)), minlength=6)
    assert chi_square(counts, probabilities(logits)) < CHI_SQUARE_LIMIT[5]


@functools.partial(jax.jit, static_argnums=0)
def support(draws, logits, params):
    """Which tokens come up in `draws` draws of each row."""
    batch, vocab_size = logits.shape

    def step(seen, position):
        tokens = sample(logits, params, jnp.full((batch,), position, jnp.int32), greedy_only=False)
        return seen | jax.nn.one_hot(tokens, vocab_size, dtype=bool), None

    seen, _ = jax.lax.scan(step, jnp.zeros((batch, vocab_size), bool), jnp.arange(draws, dtype=jnp.int32))
    return seen


def test_sample_support_is_what_top_k_and_top_p_leave():
    batch, vocab_size = 200, 12
    random = np.random.default_rng(6)
    logits = random.normal(0, 1.5, (batch, vocab_size)).astype(np.float32)
    top_k = random.integers(0, 15, batch)
    top_p = np.where(random.random(batch) < 0.3, 1.0, random.uniform(0.05, 1.0, batch)).astype(np.float32)
    min_p = np.where(random.random(batch) < 0.5, 0.0, random.uniform(0.0, 1.0, batch)).astype(np.float32)
    # Nearly equal chances for all that is left, so that each comes up in a few hundred draws; top-p sees them too.
    temperature = random.uniform(2.0, 3.0, batch).astype(np.float32)
    expected = [
        probabilities(logits[b], float(temperature[b]), int(top_k[b]), float(top_p[b]), float(min_p[b])) > 0
        for b in range(batch)
    ]
    params = rows(batch, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_array_equal(support(1500, jnp.asarray(logits), params), np.stack(expected))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 3]),
        ({"top_p": 0.5}, [0, 1]),
        ({"top_p": 0.51}, [0, 1, 3]),
        ({"top_p": 0.0}, [0]),
        ({"top_k": 4, "top_p": 0.75}, [0, 1, 3]),
        ({"min_p": 1.0}, [0, 1, 3, 4]),
        ({"min_p": 1.0, "top_k": 3}, [0, 1, 3]),
    ],
)
def test_sample_boundary_among_equal_logits_goes_by_token_id(params, expected):
    logits = [[1.0, 1.0, -jnp.inf, 1.0, 1.0]]
    seen = support(200, jnp.asarray(logits, jnp.float32), rows(1, **params))
    np.testing.assert_array_equal(np.flatnonzero(seen[0]), expected)


def mixed_batch(batch, vocab_size):
    random = np.random.default_rng(8)
    logits = random.normal(0, 2, (batch, vocab_size)).astype(np.float32)
    params = rows(
        batch,
        temperature=random.choice([0.0, 0.7, 1.0, 1.9], batch),
        top_k=random.choice([0, 0, 1, 7, 40], batch),
        top_p=random.choice([1.0, 1.0, 0.2, 0.9, 0.999], batch),
        min_p=random.choice([0.0, 0.0, 0.01, 0.3], batch),
        seed=random.integers(0, 2**32, batch, np.uint32),
    )
    return logits, params, random.integers(0, 5000, batch).astype(np.int32)


def pick(batch, index):
    logits, params, positions = batch
    return logits[index], jax.tree.map(lambda leaf: leaf[index], params), positions[index]


@pytest.mark.parametrize("vocab_size", [97, slow(4096)])
def test_sample_row_depends_on_no_other_row(vocab_size):
    batch = mixed_batch(48, vocab_size)
    tokens = draw(*batch)
    assert len(set(tokens)) > 20
    order = np.random.default_rng(9).permutation(48)
    np.testing.assert_array_equal(draw(*pick(batch, order)), tokens[order])
    for size in (1, 3):
        for start in range(0, 12, size):
            part = np.arange(start, start + size)
            np.testing.assert_array_equal(draw(*pick(batch, part)), tokens[part])


def test_sample_row_depends_on_no_padding():
    logits, params, positions = mixed_batch(6, 97)
    padded = np.concatenate([logits, np.full((10, 97), np.nan, np.float32)])
    padded_params = jax.tree.map(lambda leaf: jnp.pad(leaf, (0, 10)), params)
    tokens = draw(padded, padded_params, np.pad(positions, (0, 10)))
    np.testing.assert_array_equal(tokens[:6], draw(logits, params, positions))


@pytest.mark.parametrize("position", [0, 5])
def test_sample_same_seed_and_position_give_the_same_token(position):
    logits = np.zeros((2, 1000), np.float32)
    first, second = draw(logits, rows(2, seed=3), [position, position])
    assert first == second
    other_position, other_seed = draw(logits, rows(2, seed=[3, 4]), [position + 1, position])
    assert len({first, other_position, other_seed}) == 3


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([np.nan] * 4, {0}),
        ([-np.inf] * 4, {0}),
        ([np.nan, np.nan, 1.0, np.nan], {2}),
        ([0.0, np.inf, 0.0, np.nan], {1}),
        ([-np.inf, 0.0, -np.inf, -np.inf], {1}),
        ([3e38, -3e38, 0.0, 3e38], {0, 3}),
    ],
)
def test_sample_bad_logits_give_a_token_in_range(logits, expected, params):
    seen = set(np.flatnonzero(support(50, jnp.asarray([logits], jnp.float32), rows(1, **params))[0]))
    assert seen
    assert seen <= expected
