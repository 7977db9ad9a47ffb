"""Rows of a record: a layer's mixture of experts, timed."""

import functools
import time
from typing import Any

import jax.numpy as jnp

from bench.attention import Measured
from bench.mixture_workload import HeldWeights, MixtureWorkload
from bench.timing import Timing, measure, profiled
from bench.workloads import READ_GBPS
from jattn.step_compilation import compiler_options

_PROFILED_RUNS = 2


def measured(
    workload: MixtureWorkload, implementation: str, held: HeldWeights, *, repeats: int = 7, seconds: float = 0.1
) -> Measured:
    """Times a workload on the default device.

    Raises:
        NotImplementedError: The implementation refuses it.
        FloatingPointError: The output is not finite.
    """
    weights, logits = held(workload.shapes), workload.logits()
    given = workload.given(logits)
    start = time.perf_counter()
    executable = workload.compiled(implementation, compiler_options(unrolled=True))
    compile_s = time.perf_counter() - start
    run = functools.partial(executable, given, weights)
    if not all(bool(jnp.all(jnp.isfinite(out))) for out in run()):
        raise FloatingPointError(f"{workload.name}: `{implementation}` gives numbers that are not finite.")
    timing = measure(run, calls=workload.calls, repeats=repeats, seconds=seconds)
    profile, per = profiled(run, runs=_PROFILED_RUNS), _PROFILED_RUNS * workload.calls
    row = {
        **mixture_row(workload, f"jattn-{implementation}", timing, workload.met(logits)),
        "compile_s": round(compile_s, 2),
        "temp_MB": round(executable.memory_analysis().temp_size_in_bytes / 1e6, 2),
    }
    if profile.kernel_us:
        row["device_us"] = round(sum(profile.kernel_us.values()) / per, 3)
        row["kernels"] = round(sum(profile.kernel_counts.values()) / per, 1)
    return Measured(row, [{"of": workload.name, "impl": row["impl"], **each} for each in profile.rows(per=per)])


def mixture_row(workload: MixtureWorkload, implementation: str, timing: Timing, met: float) -> dict[str, Any]:
    """What is told of a layer whoever computes it, `met` experts being read."""
    gbps = workload.read_bytes(met) / timing.time_us / 1e3
    return {
        **workload.fields(),
        "impl": implementation,
        "time_us": round(timing.time_us, 3),
        "min_us": round(timing.min_us, 3),
        "experts_met": round(met, 2),
        "read_GBps": round(gbps, 2),
        "read_share": round(workload.read_bytes(met) / READ_GBPS / 1e3 / timing.time_us, 4),
        "TFLOPs": round(workload.flops / timing.time_us / 1e6, 2),
        "roofline_share": round(workload.roofline_us(met) / timing.time_us, 4),
    }
