"""The engine's own rate: the same requests, driven with no server."""

import time

from jattn.load.run import warm_up_prompts
from jattn.load.workload import Level, Workload
from jattn.serving.engine import Engine
from jattn.serving.sampling_params import SamplingParams


def own_rate(engine: Engine, workload: Workload, level: Level, *, warm_up: int = 8) -> float | None:
    """Output tokens a second of a run's requests, as many at a time; None at a finite rate, where they wait to come.

    For the engine's thread, while nobody asks it for anything else. The prefix cache begins and ends with nothing.
    """
    if level.rate not in (None, float("inf")):
        return None
    at_once = level.concurrency or level.num_prompts
    _serve(engine, [(ids, 2) for ids in warm_up_prompts(workload, level, warm_up)], at_once)
    engine.reset_prefix_cache()
    prompts = workload.prompts(level.num_prompts)
    start = time.perf_counter()
    _serve(engine, prompts, at_once)
    seconds = time.perf_counter() - start
    engine.reset_prefix_cache()
    return round(sum(num_tokens for _, num_tokens in prompts) / seconds, 2)


def _serve(engine: Engine, prompts: list[tuple[list[int], int]], at_once: int) -> None:
    left, num_running = list(reversed(prompts)), 0
    while left or engine.has_work:
        while left and num_running < at_once:
            ids, num_tokens = left.pop()
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            engine.add(engine.make_request(ids, params))
            num_running += 1
        num_running -= sum(event.finish_reason is not None for event in engine.step())
