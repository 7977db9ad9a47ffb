"""What an engine counts of its launches, and how long it lets the device wait."""

import dataclasses
import time

import jax

from jattn.serving.executor.idle_time import IdleTime
from tests.jattn.harness.tiny import sampled, tiny_engine


def test_launches_that_find_the_device_idle_are_counted():
    engine = tiny_engine()
    before = dataclasses.replace(engine.executor.stats)
    engine.add(engine.make_request([5, 6, 7], sampled(seed=0, max_tokens=6)))
    while engine.has_work:
        engine.step()
        for launch in engine.executor.in_flight:
            jax.block_until_ready(launch.output)  # a host that takes longer than the device
            assert launch.has_run
    stats = engine.executor.stats
    assert stats.launches - before.launches == 6  # a prefill, and five decodes
    assert stats.found_idle - before.found_idle == 5
    assert stats.waited_seconds > before.waited_seconds


class Output:
    """Of a launch that ends when it is told to."""

    def __init__(self):
        self.ended = False

    def is_ready(self):
        return self.ended


def test_idle_time_begins_between_two_looks():
    clock = [0.0]
    idle = IdleTime(lambda: clock[0])

    def at(seconds, act, *arguments):
        clock[0] = seconds
        act(*arguments)

    first, second, third = Output(), Output(), Output()
    at(1.0, idle.enqueued, first)
    at(2.0, idle.look)
    first.ended = True  # somewhen between 2 and 4
    at(4.0, idle.look)
    at(5.0, idle.look)
    at(8.0, idle.enqueued, second)
    assert (idle.at_least, idle.at_most) == (4.0, 6.0)
    at(9.0, idle.look)
    second.ended = True  # while the third is enqueued: at once at best
    at(11.0, idle.enqueued, third)
    assert (idle.at_least, idle.at_most) == (4.0, 8.0)
    third.ended = True
    at(12.0, idle.look)
    at(13.0, idle.no_work)
    at(20.0, idle.enqueued, Output())
    assert (idle.at_least, idle.at_most) == (4.0, 8.0)


def test_idle_time_counts_what_the_host_takes_amid_work_alone():
    engine, pause = tiny_engine(), 0.02
    idle = engine.executor.idle_time

    def serve():
        engine.add(engine.make_request([5, 6, 7], sampled(seed=0, max_tokens=6)))
        while engine.has_work:
            engine.step()
            jax.block_until_ready([launch.output for launch in engine.executor.in_flight])
            time.sleep(pause)

    before = idle.at_least, idle.at_most
    start = time.perf_counter()
    serve()
    seconds = time.perf_counter() - start
    found = idle.at_least - before[0], idle.at_most - before[1]
    assert found[0] < found[1]
    assert 5 * pause < found[1] < seconds
    time.sleep(2 * seconds)  # nothing to do
    serve()
    assert idle.at_most - before[1] < 2.5 * seconds
