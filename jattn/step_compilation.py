"""Steps lowered and compiled, several at once, and kept on disk."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax

from jattn.compiled_steps import CompiledSteps, StepPlan, StepRecord
from jattn.jax_setting import JaxSetting
from jattn.kernel_compilation import kernels_beside
from jattn.lowering import PLACES, LoweringProcesses, processes_for, without_collection
from jattn.progress import logger, shown
from jattn.step_cache import StepCache, jax_cache_keeps, step_cache, without_jax_cache
from jattn.step_keys import StepNames
from jattn_kernels.traced_once import traced_once

COMPILING_AT_ONCE = min(16, os.cpu_count() or 1)  # XLA compiles outside Python's lock
_CORES_A_STEP = 4  # for which its kernels are compiled beside it
_without_places = JaxSetting(PLACES, 0)

Compilation = Future[tuple[jax.stages.Compiled, StepRecord]]


def compile_steps(
    plans: Mapping[Hashable, StepPlan],
    *,
    progress: bool = False,
    only: Collection[Hashable] | None = None,
    have: CompiledSteps | None = None,
    processes: LoweringProcesses | None = None,
) -> CompiledSteps:
    """Lowers and compiles every plan, with a bar on standard error and the time left if `progress`.

    Where JAX has a cache folder, steps are kept there, and those that are there are loaded instead.

    Args:
        only: The others are loaded if they are on disk, and left out if not; None is all.
        have: Steps of these plans that are compiled already.
        processes: That lower them; if None, as many as gain time are begun for it.
    """
    found = have or CompiledSteps({})
    with contextlib.ExitStack() as stack:
        if processes is None:
            processes = stack.enter_context(contextlib.closing(LoweringProcesses(processes_for(len(plans)))))
        plans_left = {key: plan for key, plan in plans.items() if key not in found}
        kept = _Kept.of(plans_left, is_needed=processes.count > 0)
        found |= kept.loaded(plans_left)
        missing = {key: plan for key, plan in plans_left.items() if key not in found and (only is None or key in only)}
        if missing:
            bar = shown("Compiling steps", len(missing), wanted=progress)
            with bar as advance, contextlib.closing(_in_turn(missing, kept, processes, COMPILING_AT_ONCE)) as in_turn:
                for key, compilation in in_turn:
                    step, record = compilation.result()
                    found |= CompiledSteps({key: step}, {key: record})
                    advance()
    return found.in_order_of(plans)


def steps_in_turn(
    plans: Mapping[Hashable, StepPlan], *, processes: LoweringProcesses, at_once: int
) -> Generator[tuple[Hashable, Compilation]]:
    """Compiles every plan, and gives each as it is done: its result, or why there is none. Closed, it begins no more.

    Args:
        at_once: Threads that compile.
    """
    yield from _in_turn(plans, _Kept.of(plans, is_needed=processes.count > 0), processes, at_once)


class _Kept(NamedTuple):
    """Where steps are on disk.

    Attributes:
        cache: None where nothing is kept.
        names: Of those that can be kept, and that other processes can lower.
    """

    cache: StepCache | None
    names: Mapping[Hashable, str]

    @classmethod
    def of(cls, plans: Mapping[Hashable, StepPlan], *, is_needed: bool) -> "_Kept":
        """Where steps of these plans are.

        Args:
            is_needed: Whether names are, though nothing be kept.
        """
        cache = step_cache()
        return cls(cache, _names(plans) if cache is not None or is_needed else {})

    def loaded(self, plans: Mapping[Hashable, StepPlan]) -> CompiledSteps:
        """Those that are there."""
        if self.cache is None or not self.names:
            return CompiledSteps({})
        with ThreadPoolExecutor(COMPILING_AT_ONCE, threading.current_thread().name) as pool:
            devices = [plans[key].devices for key in self.names]
            timed = zip(self.names, pool.map(_timed(self.cache.load), self.names.values(), devices), strict=True)
            there = {key: (step, seconds) for key, (step, seconds) in timed if step is not None}
        records = {key: StepRecord(seconds, loaded=True) for key, (_, seconds) in there.items()}
        return CompiledSteps({key: step for key, (step, _) in there.items()}, records)

    def store(self, key: Hashable, step: jax.stages.Compiled) -> None:
        """Keeps a step, if it has a name."""
        if self.cache is not None and key in self.names:
            self.cache.store(self.names[key], step)


def _in_turn(
    plans: Mapping[Hashable, StepPlan], kept: _Kept, processes: LoweringProcesses, at_once: int
) -> Generator[tuple[Hashable, Compilation]]:
    def compiled(key: Hashable, lowered: jax.stages.Lowered, before: float) -> tuple[jax.stages.Compiled, StepRecord]:
        step, seconds = _timed(lowered.compile)()
        kept.store(key, step)
        return step, StepRecord(before + seconds, loaded=False)

    pending: dict[Compilation, Hashable] = {}
    # Threads that compile are called after whoever asked for it.
    pool = ThreadPoolExecutor(at_once, threading.current_thread().name)
    with contextlib.ExitStack() as stack:
        if kept.cache is not None and kept.names:
            stack.enter_context(without_jax_cache())
        # Many steps keep every core busy by themselves; JAX's own cache would keep each kernel as a program; and
        # several processes may tune together whatever one of them compiles.
        if _CORES_A_STEP * len(plans) <= at_once and not jax_cache_keeps() and jax.process_count() == 1:
            stack.enter_context(kernels_beside(next(iter(plans.values())).devices[0]))
        try:
            steps = {key: (plan.function, plan.arguments) for key, plan in plans.items()}
            # A step without a name is of code that no other process can be known to have.
            in_turn = processes.as_done(steps, elsewhere=plans.keys() <= kept.names.keys())
            for key, function, elsewhere in in_turn:
                try:
                    lowered, here = _timed(_lowered)(dataclasses.replace(plans[key], function=function))
                except Exception as error:
                    failed: Compilation = Future()
                    failed.set_exception(error)
                    pending[failed] = key
                else:
                    yield from _done(pending, most_left=at_once - 1)
                    pending[pool.submit(compiled, key, lowered, elsewhere + here)] = key
                yield from _done(pending, most_left=at_once)
            yield from _done(pending, most_left=0)
        finally:
            pool.shutdown(cancel_futures=True)


def _done(pending: dict[Compilation, Hashable], *, most_left: int) -> Iterator[tuple[Hashable, Compilation]]:
    """Takes those that are done, and waits while more are left."""
    while pending:
        done, _ = wait(pending, None if len(pending) > most_left else 0, FIRST_COMPLETED)
        if not done:
            return
        for compilation in done:
            yield pending.pop(compilation), compilation


def _timed[**Arguments, Result](function: Callable[Arguments, Result]) -> Callable[Arguments, tuple[Result, float]]:
    """The same function, with the seconds that it took."""

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> tuple[Result, float]:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        return result, time.perf_counter() - start

    return call


def _names(plans: Mapping[Hashable, StepPlan]) -> dict[Hashable, str]:
    """The names that steps have on disk; none of those that are made of what no other process can be known to have."""
    found = {}
    try:
        names = StepNames()
        for key, plan in plans.items():
            found[key] = names.name(plan.function, plan.arguments, plan.donate, _options(plan))
    except Exception as reason:  # not only NoName: a file may not be read, a value not be written
        logger.info("Steps are compiled at each start: %s", reason)
    return found


def _lowered(plan: StepPlan) -> jax.stages.Lowered:
    step = jax.jit(plan.function, donate_argnums=plan.donate, compiler_options=_options(plan))
    with traced_once(), _without_places.held(), without_collection():
        return step.lower(*plan.arguments)


def _options(plan: StepPlan) -> dict[str, Any] | None:
    return compiler_options(unrolled=plan.unrolled, shared=len(plan.devices) > 1)


def compiler_options(*, unrolled: bool, shared: bool = False) -> dict[str, Any] | None:
    """What XLA is told for a step on the device in use.

    A scan over stacked weights copies each layer's slice before a Triton GEMM, and hands cuBLASLt a view of it: 11.4 ms
    against 4.7 ms for a step of Llama-3-8B shapes on an H200. Two layers in turn of a loop that JAX has left, once a
    layer is optimised and its products are chosen, run as fast as all of them would (a step of Qwen3-30B-A3B for 8, 64
    and 256 tokens 7.72, 17.38, 23.29 ms for 7.73, 17.38, 23.33) and compile in 4.2 s in place of 5.5. Devices that
    share a step have all of it in one graph.

    XLA's estimate of an unrolled step's memory counts a donated pool three times, as each kernel that writes it gives a
    new one (229 GiB for a pool of 76): it tries in vain to compute things twice in place of keeping them, and warns of
    it for each step. It need not try: what a step keeps is little, and what it takes is the same.

    Devices that share a step exchange in kernels, all in one order: a graph in which two of them may run at once would
    let one take what is meant for the other, and so would kernels that begin before those ahead of them end, whatever
    XLA_FLAGS say (programmatic dependent launch).

    Args:
        unrolled: As in StepPlan.
        shared: Whether several devices run the step.
    """
    if jax.default_backend() != "gpu":
        return None
    turns = "FULL_UNROLL" if shared else "DOUBLE_BUFFER"
    unrolling = {"xla_gpu_enable_while_loop_unrolling": f"WHILE_LOOP_UNROLLING_{turns}"}
    told = {"xla_gpu_enable_triton_gemm": False, "xla_disable_hlo_passes": "rematerialization"}
    in_order = {
        "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
        "xla_gpu_enable_pdl": False,
        "xla_gpu_enable_pdl_launch": False,
    }
    return {**told, **(unrolling if unrolled else {}), **(in_order if shared else {})}
