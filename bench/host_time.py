"""What the host does in a decode step, part by part, beside what the device takes: an engine alone, and its batch full.

python -m bench.host_time [CHECKPOINT | --shapes llama-3-8b|qwen3-30b-a3b] [--batch N ...] [--steps N]
    [--sampling NAME ...] [--dtype NAME] [--cpu-time] [--kernels N]

A part's time is its own, without those inside it. The clock that measures the parts adds some microseconds a step to
them; the rate is measured without it.
"""

import argparse
import cProfile
import functools
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx

import jattn
from bench.decode_step import Model, random_model
from bench.serving import SHAPES
from bench.timing import profiled
from jattn.compiled_steps import CompiledSteps
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.executor import executor as executor_module
from jattn.serving.executor.launch import Launch
from jattn.step_cache import use_persistent_cache
from jattn_models.bundled import checkpoint_path

_WARM_UP_STEPS, _PROFILED_STEPS, _PROMPT = 16, 50, 8

SAMPLING = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "nucleus": {"temperature": 0.8, "top_p": 0.9},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
}

# Part: what is timed.
_PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "plan": ((Engine, "_plans"),),
    "arrays": ((executor_module, "decode_batch"), (executor_module, "prefill_batch")),
    "send": ((executor_module.LastSent, "__call__"),),
    "call": ((CompiledSteps, "__call__"),),
    "launch": ((executor_module.Executor, "_launch"),),
    "wait": ((Launch, "read"),),
    "take": ((Engine, "_take"), (Launch, "given")),
    "step": ((Engine, "step"),),
}


class Clock:
    """Seconds by part; what runs inside a part and is one itself counts as that alone.

    Args:
        now: Reads a clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self.seconds = dict.fromkeys(_PARTS, 0.0)
        self._inside: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Times the parts while the context lasts."""
        with ExitStack() as stack:
            for part, places in _PARTS.items():
                for owner, name in places:
                    stack.enter_context(mock.patch.object(owner, name, self._timed(part, getattr(owner, name))))
            yield

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = self._now() - start
                self.seconds[part] += elapsed - self._inside.pop()
                if self._inside:
                    self._inside[-1] += elapsed

        return call


def steps_of(engine: Engine, batch: int, steps: int, params: jattn.SamplingParams) -> Callable[[int], None]:
    """A function that takes so many steps of an engine, in each of which all rows are decoded.

    Args:
        steps: That it may take in all.
    """
    rng = np.random.default_rng(0)
    for _ in range(batch):
        engine.add(engine.make_request(rng.integers(1, 100, size=_PROMPT).tolist(), params))
    given = 0
    while given < batch:
        given += len({event.request for event in engine.step()})

    def run(count: int) -> None:
        nonlocal steps
        steps -= count
        assert steps >= 0, "the requests would end"
        for _ in range(count):
            engine.step()

    return run


def measured(engine: Engine, *, steps: int, sampling: str, cpu_time: bool = False, kernels: int = 0) -> dict[str, Any]:
    """Steps a second of a full batch, host milliseconds a step by part, Python calls, and a GPU's time."""
    batch = engine.config.max_num_seqs
    total = _WARM_UP_STEPS + 5 * steps + _PROFILED_STEPS * 3
    params = jattn.SamplingParams(max_tokens=total + batch + 8, ignore_eos=True, **SAMPLING[sampling])
    run = steps_of(engine, batch, total, params)
    run(_WARM_UP_STEPS)
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        run(steps)
        rates.append(steps / (time.perf_counter() - start))
    clock = Clock(time.thread_time if cpu_time else time.perf_counter)
    with clock.running():
        run(steps)
    profile = cProfile.Profile()
    profile.runcall(run, _PROFILED_STEPS)
    row = {
        "batch": batch,
        "sampling": sampling,
        "steps_per_s": round(statistics.median(rates), 1),
        "step_ms": round(1e3 / statistics.median(rates), 4),
        "host_ms": {part: round(seconds / steps * 1e3, 4) for part, seconds in clock.seconds.items()},
        "python_calls": round(pstats.Stats(profile).total_calls / _PROFILED_STEPS),  # type: ignore[attr-defined]
        "step_arguments": len(jax.tree.leaves((engine.executor.weights, engine.executor.state, engine.executor.pool))),
    }
    device = profiled(functools.partial(run, _PROFILED_STEPS), runs=1)
    if device.kernel_us:
        row["device_ms"] = round(device.busy_us / _PROFILED_STEPS / 1e3, 4)
        row["kernels"] = round(sum(device.kernel_counts.values()) / _PROFILED_STEPS, 1)
        row["longest"] = device.rows(per=_PROFILED_STEPS)[:kernels]
    while engine.has_work:
        engine.step()
    return row


def sentence(row: dict[str, Any]) -> str:
    """A row in words."""
    parts = ", ".join(f"{name} {ms:.3f}" for name, ms in row["host_ms"].items())
    host = sum(ms for name, ms in row["host_ms"].items() if name != "wait")
    device = f"; device {row['device_ms']} ms in {row['kernels']} kernels" if "device_ms" in row else ""
    return (
        f"Batch {row['batch']}, {row['sampling']}: {row['steps_per_s']:,} steps a second, "
        f"{row['step_ms']} ms each; host without waiting {host:.3f} ms ({parts}), "
        f"{row['python_calls']} Python calls, {row['step_arguments']} arrays of weights, state and pool{device}."
    )


def engine_of(served: Path | Model, batch: int, steps: int, dtype: str) -> Engine:
    """An engine with one decode step of `batch` rows.

    Args:
        served: A checkpoint, or a model of random weights, which is served without rules on logits.
        dtype: Of a checkpoint.
    """
    knobs: dict[str, Any] = {
        "max_num_seqs": batch,
        "smallest_decode_bucket": batch,
        "max_context_len": _WARM_UP_STEPS + 5 * steps + _PROFILED_STEPS * 3 + batch + 64,
        "prefill_tokens": 64,
        "compile_in_background": False,
    }
    if isinstance(served, Path):
        return jattn.LLM(served, dtype=dtype, progress=False, **knobs).engine
    use_persistent_cache()
    config = EngineConfig(dtype="bfloat16", smallest_prefill_bucket=64, full_sampling=False, **knobs)
    return Engine(nnx.merge(served.graph, served.weights), config)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_time", description=__doc__)
    parser.add_argument(
        "checkpoint", type=Path, nargs="?", default=checkpoint_path(), help="the bundled one by default"
    )
    parser.add_argument("--shapes", choices=SHAPES, help="of a model of random weights, instead")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--steps", type=int, default=100, help="of each measurement")
    parser.add_argument("--sampling", choices=SAMPLING, nargs="+", default=["greedy", "drawn", "nucleus"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cpu-time", action="store_true", help="parts in CPU time of the thread: on a busy machine")
    parser.add_argument(
        "--kernels", type=int, default=0, help="how many kernels of a GPU to tell of, the longest first"
    )
    options = parser.parse_args(arguments)
    served = options.checkpoint if options.shapes is None else random_model(*SHAPES[options.shapes])
    for batch in options.batch:
        engine = engine_of(served, batch, options.steps, options.dtype)
        for sampling in options.sampling:
            row = measured(
                engine, steps=options.steps, sampling=sampling, cpu_time=options.cpu_time, kernels=options.kernels
            )
            print(sentence(row), flush=True)
            for kernel in row.get("longest", ()):
                print(f"  {kernel['us']} us in {kernel['count']} launches a step: {kernel['kernel'][:100]}")


if __name__ == "__main__":
    main()
