"""Steps traced and lowered in processes of their own: both hold Python's lock, and are most of an engine's first start.

A process has no device. It is told which kind it traces for, and gives back what `jax.export` makes of a step: a
function that is lowered already. What it cannot do, such as a step of a script's own functions, is done here.
"""

import contextlib
import dataclasses
import gc
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, cast

import jax
from jax import export

from jattn.progress import logger
from jattn_kernels.call import Device, assume_device, default_device
from jattn_kernels.dispatch import implementations
from jattn_kernels.traced_once import traced_once

_FEWEST_STEPS = 4  # for which processes are begun: each imports JAX first
# Where each operation comes from: a sixth of what XLA takes for a step beside its kernels, and no part of what it does.
PLACES = "jax_traceback_in_locations_limit"
# Settings of JAX that are of this process alone, by how their names begin.
_NOT_TOLD = (
    "jax_platform",
    "jax_default_device",
    "jax_cuda_visible_devices",
    "jax_compilation_cache",
    "jax_persistent_cache",
    "jax_enable_compilation_cache",
    "jax_dump",
    "jax_export",
)

# Custom calls that `jax.export` knows nothing of, by the names that any release of jax-triton that we allow gives them.
_KERNELS = ("mosaic_gpu_v2", "triton_kernel_call", "triton_kernel_call_ffi")

Step = tuple[Callable[..., Any], Any]  # a function and its arguments, or their shapes


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """In it Python's garbage collector waits: of what is traced and lowered all is in use, and it looks at it often."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Question(NamedTuple):
    """A step to be lowered, and where it is to run.

    Attributes:
        arguments: Shapes.
        settings: Of JAX.
    """

    function: Callable[..., Any]
    arguments: Any
    device: Device
    settings: dict[str, Any]
    implementations: Any

    def answer(self) -> export.Exported:
        """The step, lowered in this process."""
        if self.implementations != implementations():
            raise ValueError("it has implementations of its own")
        assume_device(self.device)
        for name, value in {**self.settings, PLACES: 0}.items():
            if getattr(jax.config, name, value) != value:
                jax.config.update(name, value)
        with traced_once(), without_collection():
            exported = export.export(
                jax.jit(self.function),
                platforms=["cuda" if self.device.platform == "gpu" else "cpu"],
                disabled_checks=[export.DisabledSafetyCheck.custom_call(name) for name in _KERNELS],
            )(*self.arguments)
        return dataclasses.replace(exported, _get_vjp=None)  # nobody asks for it, and it cannot be sent


class LoweringProcesses:
    """Processes that lower steps as the thread that makes this would: for its device, under its settings.

    Args:
        count: How many; none is begun before it is needed. With 0 every function is given back as it is.
    """

    def __init__(self, count: int):
        values = jax.config.values
        settings = {name: getattr(jax.config, name, value) for name, value in values.items()}
        settings = {name: value for name, value in settings.items() if not name.startswith(_NOT_TOLD)}
        self._facts = default_device(), settings, implementations()
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        self._begun: list[subprocess.Popen[bytes]] = []
        self._closed = threading.Event()
        self.count = count
        for _ in range(count):
            self._idle.put(None)

    def lowered(self, function: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
        """A function of the same arguments that is traced and lowered already, or the function itself; in any thread.

        It waits for a process that has nothing to do.
        """
        process = self._idle.get()
        try:
            question = pickle.dumps(Question(function, jax.tree.map(_shape, arguments), *self._facts))
            process = process or self._begin()
            pipes: Any = process
            pickle.dump(question, pipes.stdin)
            pipes.stdin.flush()
            answer = pickle.load(pipes.stdout)
        except Exception as reason:
            answer = str(reason) or type(reason).__name__
            if process is not None:
                process.kill()  # if it has not died: it may be amid an answer
                process = None
        finally:
            self._idle.put(process)
        if isinstance(answer, str):
            if self._closed.is_set():
                return function
            logger.info("A step is lowered here: %s", " ".join(answer.split()))
            return function
        return answer.call

    def as_done[Key](
        self, steps: Mapping[Key, Step], *, elsewhere: bool = True
    ) -> Iterator[tuple[Key, Callable[..., Any], float]]:
        """Functions of the same arguments by key, in the order in which they are lowered, with the seconds of each.

        No more of them once this is closed, by whatever thread.

        Args:
            elsewhere: Whether processes may lower them; if not, every function is given back as it is.
        """
        if not self.count or not elsewhere:
            for key, (function, _) in steps.items():
                if self._closed.is_set():
                    return
                yield key, function, 0.0
            return
        waiting: queue.SimpleQueue[tuple[Key, Step]] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[Key, Callable[..., Any], float] | None] = queue.SimpleQueue()
        left = threading.Event()
        for key_and_step in steps.items():
            waiting.put(key_and_step)

        def lower() -> None:
            with contextlib.suppress(queue.Empty):
                while not left.is_set() and not self._closed.is_set():
                    key, step = waiting.get_nowait()
                    start = time.perf_counter()
                    done.put((key, self.lowered(*step), time.perf_counter() - start))
                done.put(None)  # whoever waits may go

        # Not a pool's threads, whose work an interpreter that ends waits for.
        for _ in range(min(self.count, len(steps))):
            threading.Thread(target=lower, daemon=True).start()
        try:
            for _ in steps:
                found = done.get()
                if found is None or self._closed.is_set():
                    return
                yield found
        finally:
            left.set()

    def _begin(self) -> "subprocess.Popen[bytes]":
        unset = ("XLA_FLAGS", "CUDA_VISIBLE_DEVICES")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command, pipe = [sys.executable, "-m", "jattn.lowering"], subprocess.PIPE
        # Ctrl-C is for the process that waits for it.
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
        self._begun.append(process)
        return process

    def close(self) -> None:
        """Ends them; who waits for one is given the function itself."""
        self._closed.set()
        for process in self._begun:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what is left in it has nobody to go to
                    cast(BinaryIO, pipe).close()


def processes_for(num_steps: int, *, most: int = 8) -> int:
    """How many processes gain time for so many steps: none but for a GPU, and for several steps."""
    if num_steps < _FEWEST_STEPS or default_device().platform != "gpu":
        return 0
    return min(num_steps, (os.cpu_count() or 1) // 2, most)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """An argument's, wherever it lies."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None and sharding.num_devices > 1:
        raise ValueError("its arguments are shared by several devices")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answers until nobody asks: a step, or why there is none."""
    while True:
        try:
            question = pickle.load(questions)
        except EOFError:
            return
        try:
            answer = pickle.loads(question).answer()  # it may name what cannot be imported here
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what is printed must not stand between answers
        # Not of `__main__`: what is unpickled asks for this module by its name.
        from jattn import lowering

        jax.config.update("jax_export_ignore_forward_compatibility", True)
        lowering._serve(sys.stdin.buffer, answers)
