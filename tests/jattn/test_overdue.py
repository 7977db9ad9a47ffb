"""A limit to many short waits: it acts on one that takes too long, at its time, and on no other."""

import asyncio

import pytest

from jattn.server.overdue import Overdue


class Loop:
    """An event loop's clock and timers, by hand."""

    def __init__(self):
        self.now, self.timers = 0.0, []

    def time(self):
        return self.now

    def call_at(self, when, act):
        timer = Timer(when, act)
        self.timers.append(timer)
        return timer

    def call_later(self, delay, act):
        return self.call_at(self.now + delay, act)

    def run_to(self, now):
        while due := [timer for timer in self.timers if timer.when <= now]:
            timer = min(due, key=lambda timer: timer.when)
            self.timers.remove(timer)
            self.now = timer.when
            if not timer.cancelled:
                timer.act()
        self.now = now


class Timer:
    def __init__(self, when, act):
        self.when, self.act, self.cancelled = when, act, False

    def cancel(self):
        self.cancelled = True


@pytest.fixture
def loop(monkeypatch):
    made = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: made)
    return made


def test_a_long_wait_is_acted_upon_at_its_time_after_any_short_ones(loop):
    acted = []
    overdue = Overdue(2.0, lambda: acted.append(loop.now))
    for begin in (0.0, 1.0, 1.9, 5.5):
        loop.run_to(begin)
        overdue.begin()
        loop.run_to(begin + 0.05)
        overdue.end()
    loop.run_to(6.0)
    overdue.begin()
    loop.run_to(7.9)
    assert not acted
    assert not overdue.acted
    loop.run_to(20.0)
    assert acted == [8.0]
    assert overdue.acted


def test_short_waits_share_a_timer(loop):
    overdue = Overdue(2.0, lambda: None)
    for _ in range(100):
        overdue.begin()
        loop.run_to(loop.now + 0.01)
        overdue.end()
    assert len(loop.timers) == 1
    loop.run_to(10.0)
    assert not loop.timers  # none runs on for waits that do not come


def test_what_is_closed_or_has_no_limit_acts_never(loop):
    acted = []
    closed, endless = Overdue(2.0, lambda: acted.append(1)), Overdue(None, lambda: acted.append(2))
    closed.begin()
    endless.begin()
    closed.close()
    loop.run_to(100.0)
    assert not acted
