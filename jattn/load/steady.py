"""The part of a run in which as many requests run as may at a time: its ends say nothing of how a server keeps up."""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

_LOOK_SECONDS = 0.01  # between two looks: some microseconds each, in the server's process


class Look(NamedTuple):
    """What there was at a moment.

    Attributes:
        seconds: When, by a clock that only goes on.
        num_running: Requests that had a row.
        idle_at_least, idle_at_most: Seconds for which the device had waited for the host so far.
    """

    seconds: float
    num_running: int
    idle_at_least: float
    idle_at_most: float


class IdleShares(NamedTuple):
    """Shares of the time in which the device waited for the host.

    Attributes:
        seconds: Of that time.
    """

    seconds: float
    at_least: float
    at_most: float


class SteadyPart:
    """Looks at a run now and then, in a thread of its own, while its context lasts.

    Args:
        look: (requests that run, idle seconds at least, at most), asked from that thread.
        most_running: Requests that may run at the same time.
        now: Reads a clock, in seconds.
    """

    def __init__(
        self,
        look: Callable[[], tuple[int, float, float]],
        most_running: int,
        now: Callable[[], float] = time.perf_counter,
    ):
        self._look, self._most_running, self._now = look, most_running, now
        self._first: Look | None = None
        self._last: Look | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jattn-steady", daemon=True)

    def __enter__(self) -> "SteadyPart":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Takes note of this moment."""
        found = Look(self._now(), *self._look())
        if found.num_running >= self._most_running:
            self._first, self._last = self._first or found, found

    def idle_shares(self) -> IdleShares | None:
        """From the first to the last moment at which all were seen to run; None if that was one moment, or never."""
        first, last = self._first, self._last
        if first is None or last is None or last.seconds <= first.seconds:
            return None
        seconds = last.seconds - first.seconds
        least, most = last.idle_at_least - first.idle_at_least, last.idle_at_most - first.idle_at_most
        return IdleShares(seconds, least / seconds, most / seconds)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.look()
