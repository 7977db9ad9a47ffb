"""Fixtures of the models' tests."""

import jax
import pytest


@pytest.fixture
def compiled_in_haste():
    """Steps compile sooner and run slower: for engines that serve a few tokens of a tiny model."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
