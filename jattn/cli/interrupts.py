"""Ctrl-C while a model runs, for the command line."""

import signal
from collections.abc import Iterable, Iterator
from typing import Any


class Interrupts:
    """Ctrl-C, remembered, since what a signal raises inside JAX can get lost. It raises as usual but within `deltas`.

    As a context it handles the signal, unless that is ignored, as in the background, or another's affair. After Ctrl-C
    it ends by KeyboardInterrupt, whatever that has become: an import of JAX makes an ImportError of it.
    """

    def __init__(self):
        self._seen = self._between_deltas = False

    def __enter__(self) -> "Interrupts":
        self._handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._handles:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._seen:
            raise KeyboardInterrupt from None

    def deltas(self, deltas: Iterable[Any]) -> Iterator[Any]:
        """The deltas; Ctrl-C ends them after one, and a second one raises.

        Raises:
            KeyboardInterrupt: Ctrl-C, now or since the context began.
        """
        self._between_deltas = True
        self._check()
        for delta in deltas:
            yield delta
            self._check()
        self._between_deltas = False

    def _interrupt(self, *_: Any) -> None:
        waits = self._between_deltas and not self._seen
        self._seen = True
        if not waits:
            raise KeyboardInterrupt

    def _check(self) -> None:
        if self._seen:
            raise KeyboardInterrupt
