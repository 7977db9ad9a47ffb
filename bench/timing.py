"""Timing of work that nobody waits for: a span of many calls, and beside it what each kernel took."""

import dataclasses
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median and the least of the repeats."""

    time_us: float
    min_us: float


def span_us(run: Callable[[], Any], runs: int) -> float:
    """Microseconds from the first of `runs` dispatches to the end of the last one's work; none is waited for.

    An output is let go before the next run, which can then have its place: where buffers move, XLA sends all kernels of
    a command buffer anew, and the host may take longer than the device.
    """
    start = time.perf_counter()
    last = None
    for _ in range(runs):
        last = None
        last = run()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) * 1e6


def measure(run: Callable[[], Any], *, calls: int, repeats: int = 7, seconds: float = 0.1) -> Timing:
    """Times `run`, which dispatches one executable of `calls` back-to-back calls.

    Args:
        repeats: Spans of which the median is taken.
        seconds: Length of a span, about.
    """
    span_us(run, 2)
    runs = min(100, max(2, math.ceil(seconds * 1e6 / span_us(run, 1))))
    per_call = [span_us(run, runs) / (runs * calls) for _ in range(repeats)]
    return Timing(statistics.median(per_call), min(per_call))


@dataclasses.dataclass(frozen=True)
class Profile:
    """What the device did while it was traced.

    Attributes:
        kernel_us: Microseconds by kernel name, copies included, the longest first.
        kernel_counts: How often each ran.
        busy_us: Microseconds in which anything ran.
        span_us: Microseconds from the first start to the last end.
        longest_copy_us: Microseconds of the longest copy; a copy of the pool would take hundreds.
    """

    kernel_us: dict[str, float]
    kernel_counts: dict[str, int]
    busy_us: float
    span_us: float
    longest_copy_us: float = 0.0

    @property
    def busy_share(self) -> float | None:
        return self.busy_us / self.span_us if self.span_us else None

    def rows(self, *, per: int) -> list[dict[str, Any]]:
        """One object a kernel, times and counts divided by `per`."""
        return [
            {"kernel": name, "us": round(total / per, 3), "count": round(self.kernel_counts[name] / per, 2)}
            for name, total in self.kernel_us.items()
        ]


def profiled(run: Callable[[], Any], *, runs: int) -> Profile:
    """The profile of `runs` runs; empty on a device without streams, such as a CPU.

    XLA replays no command buffers while it is traced, so gaps between kernels are longer than in a span.
    """
    jax.block_until_ready(run())
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing the host delays the dispatches
    options.host_tracer_level = 1
    options.enable_hlo_proto = False
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            span_us(run, runs)
        (file,) = Path(folder).rglob("*.xplane.pb")
        return read_profile(jax.profiler.ProfileData.from_file(str(file)))


def read_profile(data: Any) -> Profile:
    """Sums the events of the GPUs' streams; a graph's kernels count as kernels."""
    times: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    intervals = []
    longest_copy = 0.0
    for plane in data.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                times[event.name] += event.duration_ns / 1e3
                counts[event.name] += 1
                if "memcpy" in event.name.lower():
                    longest_copy = max(longest_copy, event.duration_ns / 1e3)
                intervals.append((event.start_ns, event.start_ns + event.duration_ns))
    longest_first = dict(sorted(times.items(), key=lambda item: -item[1]))
    if not intervals:
        return Profile({}, {}, 0.0, 0.0)
    intervals.sort()
    busy, end = 0.0, intervals[0][0]
    for start, stop in intervals:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return Profile(longest_first, dict(counts), busy / 1e3, (end - intervals[0][0]) / 1e3, longest_copy)
