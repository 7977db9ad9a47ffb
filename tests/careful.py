"""Compiling as users do, where tests compile in haste."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def compiled_with_care() -> Iterator[None]:
    """Around what runs long enough to pay for it, or must have float32's last digits: haste costs one of them."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
