"""A server of one's own, measured: it runs in this process on loopback, its client in another."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from jattn.load.child import measured_apart
from jattn.load.figures import Row
from jattn.load.own import own_rate
from jattn.load.steady import SteadyPart
from jattn.load.workload import Level, Workload
from jattn.server.in_thread import served_in_thread
from jattn.server.service import Service, ServiceOptions
from jattn.serving.frontend.llm import LLM


def measured_served(llm: LLM, workload: Workload, levels: Sequence[Level]) -> Iterator[Row]:
    """Figures of each run, and the engine's own rate beside them: the same requests with no server.

    What the device was idle stands there of the whole run, and of its steady part.

    Args:
        workload: Each run draws from another seed, counted up from this one's.
    """
    with served_in_thread(llm, ServiceOptions(model_names=("model",))) as (url, service):
        for number, level in enumerate(levels):
            drawn = dataclasses.replace(workload, seed=workload.seed + number)
            own = service.thread.call(lambda engine, level=level, drawn=drawn: own_rate(engine, drawn, level)).result()
            before = _counts(llm)
            look = functools.partial(_look, llm, service)
            with SteadyPart(look, most_running=_most_running(llm, level)) as part:
                row = measured_apart(url, drawn, level)
            launches, found_idle, *idle_seconds = np.subtract(_counts(llm), before).tolist()
            row["found_idle_share"] = round(found_idle / max(1, launches), 4)
            row["idle_share_at_least"], row["idle_share_at_most"] = (
                round(seconds / row["seconds"], 4) for seconds in idle_seconds
            )
            if (steady := part.idle_shares()) is not None:
                row |= {
                    "steady_seconds": round(steady.seconds, 3),
                    "steady_idle_share_at_least": round(steady.at_least, 4),
                    "steady_idle_share_at_most": round(steady.at_most, 4),
                }
            if own is not None:
                row |= {
                    "own_output_tokens_per_s": own,
                    "served_share": round(row["output_tokens_per_s"] / own, 4),
                }
            yield row


def _look(llm: LLM, service: Service) -> tuple[int, float, float]:
    return service.thread.count()[1], *_idle_seconds(llm)


def _most_running(llm: LLM, level: Level) -> int:
    """Requests of a run that have a row at the same time at most."""
    return min(level.concurrency or level.num_prompts, llm.engine.config.max_num_seqs)


def _counts(llm: LLM) -> tuple[float, ...]:
    """Launches, those that found the device idle, and its idle time."""
    stats = llm.engine.executor.stats
    return float(stats.launches), float(stats.found_idle), *_idle_seconds(llm)


def _idle_seconds(llm: LLM) -> tuple[float, float]:
    """For how long the device waited for the host so far, at least and at most."""
    idle = llm.engine.executor.idle_time
    return idle.at_least, idle.at_most
