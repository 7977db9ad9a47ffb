"""A setting of JAX that has another value for a while, in the whole process."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax


class JaxSetting:
    """Held at a value while anyone asks for it, in whatever threads; then it is again what it was.

    Args:
        changed: Called whenever its holders change.
    """

    def __init__(self, name: str, value: Any, changed: Callable[[], None] = lambda: None):
        self._name, self._value, self._changed = name, value, changed
        self._holders, self._before, self._lock = 0, None, threading.Lock()

    @property
    def is_held(self) -> bool:
        """Whether anyone asks for it now."""
        return self._holders > 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """In it the setting has the value."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        with self._lock:
            if not self.is_held:
                self._before = getattr(jax.config, self._name)
            self._holders += by
            jax.config.update(self._name, self._value if self.is_held else self._before)
            self._changed()
