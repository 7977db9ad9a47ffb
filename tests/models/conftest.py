"""Fixtures of the models' tests."""

import jax
import pytest


@pytest.fixture
def compiled_with_care():
    """Where logits are held against another framework's to float32's last digits: hasty compiling costs one of them."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
