"""IdleTime: for how long the device had nothing to do amid work, as far as a host can tell that looks now and then."""

import time
from collections.abc import Callable
from typing import Any


class IdleTime:
    """Adds up the time between a launch's end and the next one, which the host was late with.

    Nothing tells the host when a launch ended: it looks whether it has, wherever it passes by. So the device fell idle
    between the last look that found it at work and the first that did not.

    Args:
        now: Reads a clock, in seconds.

    Attributes:
        at_least, at_most: Seconds so far.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.at_least = self.at_most = 0.0
        self._now = now
        self._newest: Any = None
        self._seen_at_work = 0.0
        self._seen_idle: float | None = None

    def look(self) -> bool:
        """Whether the device has nothing to do amid work; asking waits for nothing."""
        if self._newest is not None and self._seen_idle is None:
            if self._newest.is_ready():
                self._seen_idle = self._now()
            else:
                self._seen_at_work = self._now()
        return self._seen_idle is not None

    def enqueued(self, output: Any) -> None:
        """Takes note of a launch, just enqueued.

        Args:
            output: An array of it, not to be donated.
        """
        self.look()  # the one before may have ended while this one was on its way
        now = self._now()
        if self._seen_idle is not None:
            self.at_least += now - self._seen_idle
            self.at_most += now - self._seen_at_work
        self._newest, self._seen_at_work, self._seen_idle = output, now, None

    def no_work(self) -> None:
        """Takes note that there is nothing to launch: what follows does not count."""
        self._newest = self._seen_idle = None
