"""Hearing what JAX compiles: a server that serves should compile nothing more."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jattn.serving.executor.background import THREAD

_COMPILED = "backend_compile_duration"


@contextlib.contextmanager
def heard_compilations(on_compile: Callable[[], None]) -> Iterator[None]:
    """While the context lasts, calls `on_compile` after each compilation of the process, in its thread.

    What is compiled in the background does not count: nobody waits for it.
    """

    def listen(event: str, *_: Any, **__: Any) -> None:
        if event.endswith(_COMPILED) and not threading.current_thread().name.startswith(THREAD):
            on_compile()

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
