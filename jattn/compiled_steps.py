"""Compiled steps: one executable a bucket, made ahead of time and replayed; what CUDA graphs are elsewhere."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from jattn.lowering import LoweringProcesses, processes_for
from jattn.progress import logger, shown
from jattn.step_cache import step_cache, without_jax_cache
from jattn.step_keys import StepNames

_COMPILING_AT_ONCE = min(16, os.cpu_count() or 1)  # XLA compiles outside Python's lock


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step still to be compiled.

    Attributes:
        function: Pure function of arrays.
        arguments: Example arguments; only shapes and dtypes matter (`jax.ShapeDtypeStruct` will do).
        donate: Positions of the arguments whose memory the step may reuse.
        unrolled: Whether a GPU runs every loop of known length, and those inside it, turn by turn without a loop: for
            a step so short that launching it counts, and whose loops do not multiply.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    unrolled: bool = False

    def without_arrays(self) -> "StepPlan":
        """The same plan of shapes alone, which holds no memory and outlives arrays that are donated."""
        return dataclasses.replace(self, arguments=jax.tree.map(described, self.arguments))

    @property
    def devices(self) -> tuple[Any, ...]:
        """Those that its arguments are tied to, in their order; JAX's default where they are tied to none."""
        for leaf in jax.tree.leaves(self.arguments):
            sharding = described(leaf).sharding
            if isinstance(sharding, NamedSharding):
                mesh: Any = sharding.mesh
                return tuple(mesh.devices.flat)
            if sharding is not None:
                return tuple(sharding.device_set)
        return tuple(jax.device_put(0).devices())


def described(leaf: Any) -> jax.ShapeDtypeStruct:
    """An argument's shape, and where it lies if it is tied to devices."""
    is_tied = getattr(leaf, "committed", isinstance(leaf, jax.ShapeDtypeStruct))
    sharding = leaf.sharding if is_tied else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False))


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """How a step came to be.

    Attributes:
        seconds: Of tracing, lowering and compiling it, or of loading it.
        loaded: Whether it was on disk.
    """

    seconds: float
    loaded: bool


class CompiledSteps:
    """Executables by key. A call never compiles: another shape, dtype or key is an error.

    Attributes:
        records: How each came to be, as far as known.
    """

    def __init__(
        self,
        executables: Mapping[Hashable, jax.stages.Compiled],
        records: Mapping[Hashable, StepRecord] | None = None,
    ):
        self._executables = dict(executables)
        self.records = dict(records or {})

    @property
    def temporary_bytes(self) -> int:
        """What the step that needs most needs of the device beside its arguments and results; 0 where none says."""
        found = (step.memory_analysis() for step in self._executables.values())
        return max((analysis.temp_size_in_bytes for analysis in found if analysis is not None), default=0)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._executables

    def __getitem__(self, key: Hashable) -> jax.stages.Compiled:
        """The executable of a bucket.

        Raises:
            KeyError: The bucket was not compiled; the message lists those that were.
        """
        if key not in self._executables:
            raise KeyError(f"No step was compiled for {key}. Compiled: {', '.join(map(str, self._executables))}.")
        return self._executables[key]

    def __or__(self, other: "CompiledSteps") -> "CompiledSteps":
        """These and others, which replace those of the same keys."""
        return CompiledSteps(self._executables | other._executables, self.records | other.records)

    def __call__(self, key: Hashable, *arguments: Any) -> Any:
        return self[key](*arguments)


def compile_steps(
    plans: Mapping[Hashable, StepPlan],
    *,
    progress: bool = False,
    only: Collection[Hashable] | None = None,
    processes: LoweringProcesses | None = None,
) -> CompiledSteps:
    """Lowers and compiles every plan, with a bar on standard error and the time left if `progress`.

    Where JAX has a cache folder, steps are kept there, and those that are there are loaded instead.

    Args:
        only: The others are loaded if they are on disk, and left out if not; None is all.
        processes: That lower them; if None, as many as gain time are begun for it.
    """
    cache, count = step_cache(), processes_for(len(plans)) if processes is None else processes.count
    names = _names(plans) if cache is not None or count else {}
    records: dict[Hashable, StepRecord] = {}
    executables: dict[Hashable, jax.stages.Compiled] = {}
    # Threads that compile are called after whoever asked for it.
    with ThreadPoolExecutor(_COMPILING_AT_ONCE, threading.current_thread().name) as pool:
        if cache is not None:
            devices = [plans[key].devices for key in names]
            loaded = pool.map(_timed(cache.load), names.values(), devices)
            for key, (step, seconds) in zip(names, loaded, strict=True):
                if step is not None:
                    executables[key], records[key] = step, StepRecord(seconds, loaded=True)
        wanted = plans if only is None else only
        missing = {key: plan for key, plan in plans.items() if key in wanted and key not in executables}

        def compiled(key: Hashable, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
            step = lowered.compile()
            if cache is not None and key in names:
                cache.store(names[key], step)
            return step

        if missing:
            bar = shown("Compiling steps", len(missing), wanted=progress)
            # A step without a name is of code that no other process can be known to have.
            named = missing.keys() <= names.keys()
            if processes is None or not named:
                lowering = contextlib.closing(LoweringProcesses(processes_for(len(missing)) if named else 0))
            else:
                lowering = contextlib.nullcontext(processes)
            steps = {key: (plan.function, plan.arguments) for key, plan in missing.items()}
            keeping = without_jax_cache() if cache is not None and names else contextlib.nullcontext()
            with bar as advance, keeping, lowering as processes:
                compiling = {}
                for key, function, elsewhere in processes.as_done(steps):
                    lowered, here = _timed(_lowered)(dataclasses.replace(missing[key], function=function))
                    compiling[pool.submit(_timed(compiled), key, lowered)] = key, elsewhere + here
                for done in as_completed(compiling):
                    key, before = compiling[done]
                    executables[key], seconds = done.result()
                    records[key] = StepRecord(before + seconds, loaded=False)
                    advance()
    there = [key for key in plans if key in executables]
    return CompiledSteps({key: executables[key] for key in there}, {key: records[key] for key in there})


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
            options = compiler_options(unrolled=plan.unrolled)
            found[key] = names.name(plan.function, plan.arguments, plan.donate, options)
    except Exception as reason:  # not only NoName: a file may not be read, a value not be written
        logger.info("Steps are compiled at each start: %s", reason)
    return found


def _lowered(plan: StepPlan) -> jax.stages.Lowered:
    options = compiler_options(unrolled=plan.unrolled)
    step = jax.jit(plan.function, donate_argnums=plan.donate, compiler_options=options)
    return step.lower(*plan.arguments)


def compiler_options(*, unrolled: bool) -> dict[str, Any] | None:
    """What XLA is told for a step on the device in use.

    A scan over stacked weights copies each layer's slice before a Triton GEMM, and hands cuBLASLt a view of it: 11.4 ms
    against 4.7 ms for a step of Llama-3-8B shapes on an H200. Unrolled late, once a layer is optimised and its products
    are chosen, the same loop is launched by the host in 1.1 ms instead of 2.4, and one of 8 requests takes 60 us less.

    XLA's estimate of an unrolled step's memory counts a donated pool three times, as each kernel that writes it gives a
    new one (229 GiB for a pool of 76): it tries in vain to compute things twice in place of keeping them, and warns of
    it for each step. It need not try: what a step keeps is little, and what it takes is the same.
    """
    if jax.default_backend() != "gpu":
        return None
    unrolling = {"xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_FULL_UNROLL"}
    told = {"xla_gpu_enable_triton_gemm": False, "xla_disable_hlo_passes": "rematerialization"}
    return {**told, **(unrolling if unrolled else {})}


def smallest_bucket(buckets: Iterable[int], size: int) -> int:
    """The smallest bucket that holds `size`.

    Raises:
        ValueError: None does.
    """
    holding = [bucket for bucket in buckets if bucket >= size]
    if not holding:
        raise ValueError(f"`size` must fit the largest bucket. Got {size}, buckets {sorted(buckets)}.")
    return min(holding)


def power_of_two_buckets(largest: int, smallest: int = 1) -> tuple[int, ...]:
    """`smallest`, doubled until it holds `largest`; the last one is `largest` itself."""
    buckets = []
    size = min(smallest, largest)
    while size < largest:
        buckets.append(size)
        size *= 2
    return (*buckets, largest)


# Tokens of a step from which on its time is theirs: padding beyond it costs what tokens cost.
FINER_FROM = 1024


def token_buckets(largest: int, smallest: int = 1) -> tuple[int, ...]:
    """`smallest` doubled up to FINER_FROM, then four a doubling: a fifth of such a step at most is padding."""
    buckets = power_of_two_buckets(min(largest, max(smallest, FINER_FROM)), smallest)
    while buckets[-1] < largest:
        quarter = 2 ** (buckets[-1].bit_length() - 3)
        buckets += (min(buckets[-1] + quarter, largest),)
    return buckets


def use_persistent_cache(folder: Path | None = None) -> None:
    """Keeps compiled steps between runs in a private folder; does nothing where JAX already has a cache folder.

    Args:
        folder: Where; `$XDG_CACHE_HOME/jattn/xla` or `~/.cache/jattn/xla` if None.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    try:
        if folder is None:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jattn" / "xla"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except (OSError, RuntimeError):
        return  # a read-only home or none: compile each time
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # dozens of small ones take a second together
