"""What the steps ask of logits; the steps themselves run in test_engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.serving.steps.choice import not_finite

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, -2.0, 3.0], False),
        ([1.0, -INF, 3.0], False),
        ([-INF, 0.0, -INF], False),
        ([1.0, NAN, 3.0], True),
        ([NAN, NAN, NAN], True),
        ([1.0, INF, 3.0], True),
        ([NAN, INF, -INF], True),
        ([NAN, -INF, -INF], True),
        ([-INF, -INF, -INF], True),
    ],
)
def test_not_finite_looks_at_each_row_alone(row, expected):
    good = [0.0, 1.0, 2.0]
    assert not_finite(jnp.array([good, row, good], jnp.float32)).tolist() == [False, expected, False]


@pytest.mark.parametrize("vocab_size", [512, 2048])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF], ids=str)
def test_not_finite_finds_one_number_among_many(vocab_size, dtype, bad):
    places = (0, vocab_size // 2, vocab_size - 1)
    logits = np.random.default_rng(0).standard_normal((len(places) + 1, vocab_size), np.float32)
    for row, place in enumerate(places):
        logits[row, place] = bad
    assert jax.jit(not_finite)(jnp.asarray(logits, dtype)).tolist() == [True] * len(places) + [False]
