"""The Triton kernel of the filters, by its interpreter."""

# isort: off
from tests.kernels.harness.triton_interpreter import interpreted
# isort: on

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import kept_tokens
from jattn_kernels.triton.filters import entry
from jattn_kernels.triton.filters.config import config_of
from tests.kernels.harness.filter_cases import assert_kept, filters, mixed_filters, normal_logits, odd_logits
from tests.often import slow

# What five rows ask for.
MIXED = {
    "temperature": [0.8, 0.8, 1.5, 0.3, 0.0],
    "top_k": [0, 50, 7, 0, 3],
    "top_p": [0.9, 0.9, 1.0, 1.0, 0.5],
    "min_p": [0.0, 0.02, 0.0, 0.1, 0.0],
}


def kept(logits, asked):
    with interpreted():
        return np.asarray(jax.block_until_ready(kept_tokens(logits, **asked, implementation="triton")))


@pytest.fixture
def configure(monkeypatch):
    """Changes the kernel's constants."""

    def change(**constants):
        changed = lambda vocab_size: dataclasses.replace(config_of(vocab_size), **constants)  # noqa: E731
        monkeypatch.setattr(entry, "config_of", changed)

    return change


@pytest.mark.parametrize("vocab_size", [777, slow(1000), 2])
def test_triton_filters_keep_what_the_oracle_keeps(vocab_size):
    logits, asked = normal_logits((5, vocab_size), step=0.25), filters(5, **MIXED)
    assert_kept(kept(logits, asked), logits, asked)


@pytest.mark.parametrize("first", [0, slow(1)])
def test_triton_filters_of_odd_rows(first):
    """Every other one of them, for each is done by itself."""
    logits = odd_logits(130)[first::2]
    asked = filters(len(logits), top_k=60, top_p=0.4)
    assert_kept(kept(logits, asked), logits, asked)


@pytest.mark.slow
def test_triton_filters_of_a_large_vocabulary():
    logits = normal_logits((3, 20_002))
    asked = filters(3, top_k=[0, 50, 9000], top_p=[0.9, 0.9, 1.0])
    assert_kept(kept(logits, asked), logits, asked)


def test_triton_filters_of_more_tokens_than_registers_hold(configure):
    configure(depth=1, warps=1, unroll=1, thresholds=4)
    logits = jnp.concatenate([normal_logits((2, 500)), normal_logits((1, 500), step=1.0)])
    asked = filters(3, top_k=[0, 90, 300], top_p=[0.5, 1.0, 0.7])
    assert_kept(kept(logits, asked), logits, asked)


def test_triton_filters_keep_to_the_bit_what_xla_keeps():
    """Where every exponential is a power of two, which both find exactly."""
    logits = jnp.asarray(-np.random.default_rng(0).integers(0, 12, (3, 400)), jnp.float32)
    asked = filters(3, temperature=1 / np.log(2), top_p=[0.5, 0.75, 0.99], top_k=[0, 200, 3])
    np.testing.assert_array_equal(kept(logits, asked), kept_tokens(logits, **asked, implementation="xla"))


def test_triton_takes_no_empty_batch():
    with interpreted(), pytest.raises(NotImplementedError, match="some rows of logits, not none"):
        kept_tokens(jnp.ones((0, 5)), **filters(0), implementation="triton")
    assert kept_tokens(jnp.ones((0, 5)), **filters(0)).shape == (0, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_triton_filters_of_any_rows(configure, seed):
    rng = np.random.default_rng(seed)
    configure(
        depth=int(rng.choice([1, 2, 8])),
        thresholds=int(rng.choice([2, 4, 8])),
        unroll=int(rng.choice([1, 2, 4])),
        warps=int(rng.choice([1, 2, 4])),
    )
    vocab_size = int(rng.integers(3, 1000))
    scale, step = float(rng.choice([1e-6, 0.1, 1, 10, 100])), rng.choice([None, 0.25, 4.0])
    logits = [normal_logits((6, vocab_size), seed=seed, scale=scale, step=step), odd_logits(vocab_size)]
    logits = jnp.concatenate(logits)
    asked = mixed_filters(len(logits), seed)
    if seed % 3 == 0:
        asked |= {"top_k": jnp.asarray(rng.integers(0, vocab_size + 3, len(logits)), jnp.int32)}
    if seed % 4 == 0:
        asked |= {"temperature": jnp.asarray(rng.choice([2e-38, 1e-3, 1000.0, 1e6], len(logits)), jnp.float32)}
    assert_kept(kept(logits, asked), logits, asked)
