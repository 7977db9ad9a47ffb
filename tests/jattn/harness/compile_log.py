"""Listening to what JAX compiles."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that fills with the compilations that happen inside; that it would is made sure at the end."""
    events: list[str] = []
    heard: list[str] = []

    def count(event, duration, **_):
        if "compile" in event:
            heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield events
        events.extend(heard)
        jax.jit(lambda x: x + 1)(jnp.asarray(np.zeros(3, np.float32)))
        assert len(heard) > len(events), "the listener must hear a compilation when there is one"
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
