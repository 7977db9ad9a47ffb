"""What an engine counts of its launches."""

import dataclasses

import jax

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
