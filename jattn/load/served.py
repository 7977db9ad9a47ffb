"""A server of one's own, measured: it runs in this process on loopback, its client in another."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jattn.load.child import measured_apart
from jattn.load.figures import Row
from jattn.load.own import own_rate
from jattn.load.workload import Level, Workload
from jattn.server.in_thread import served_in_thread
from jattn.server.service import ServiceOptions
from jattn.serving.frontend.llm import LLM


def measured_served(llm: LLM, workload: Workload, levels: Sequence[Level]) -> Iterator[Row]:
    """Figures of each run, and the engine's own rate beside them: the same requests with no server.

    Args:
        workload: Each run draws from another seed, counted up from this one's.
    """
    with served_in_thread(llm, ServiceOptions(model_names=("model",))) as (url, service):
        for number, level in enumerate(levels):
            drawn = dataclasses.replace(workload, seed=workload.seed + number)
            own = service.thread.call(lambda engine, level=level, drawn=drawn: own_rate(engine, drawn, level)).result()
            before = _counts(llm)
            row = measured_apart(url, drawn, level)
            launches, found_idle, *idle_seconds = np.subtract(_counts(llm), before).tolist()
            row["found_idle_share"] = round(found_idle / max(1, launches), 4)
            row["idle_share_at_least"], row["idle_share_at_most"] = (
                round(seconds / row["seconds"], 4) for seconds in idle_seconds
            )
            if own is not None:
                row |= {
                    "own_output_tokens_per_s": own,
                    "served_share": round(row["output_tokens_per_s"] / own, 4),
                }
            yield row


def _counts(llm: LLM) -> tuple[float, ...]:
    """Launches, those that found the device idle, and its idle time in seconds, at least and at most."""
    executor = llm.engine.executor
    stats, idle = executor.stats, executor.idle_time
    return float(stats.launches), float(stats.found_idle), idle.at_least, idle.at_most
