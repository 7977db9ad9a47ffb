"""Overdue: a limit to many short waits, for the cost of a timer once in a while instead of one for each wait."""

import asyncio
from collections.abc import Callable


class Overdue:
    """Calls a function if a wait takes too long; one wait at a time, in the running event loop.

    `asyncio.timeout` takes some 5 us, which is a fifth of what a streamed token costs. Here a wait is a number: the
    timer runs on from wait to wait, and looks when it is up whether one has begun that it must wait out.

    Args:
        seconds: None sets no limit.
        act: Called once for a wait that has taken so long.

    Attributes:
        acted: Whether it was called.
    """

    def __init__(self, seconds: float | None, act: Callable[[], object]):
        self._seconds, self._act = seconds, act
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._since: float | None = None
        self.acted = False

    def begin(self) -> None:
        """Takes note that a wait begins."""
        if self._seconds is None:
            return
        self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._look)

    def end(self) -> None:
        """Takes note that it has ended."""
        self._since = None

    def close(self) -> None:
        """Takes the timer back; nothing is called any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._since = None

    def _look(self) -> None:
        assert self._seconds is not None
        self._timer = None
        if self._since is None:  # the next wait begins a timer
            return
        up = self._since + self._seconds
        if self._loop.time() < up:
            self._timer = self._loop.call_at(up, self._look)
        else:
            self._since, self.acted = None, True
            self._act()
