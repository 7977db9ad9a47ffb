"""Steps that are compiled while others serve: a thread takes them one by one, and tells of those that fail."""

import atexit
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Mapping

from jattn.compiled_steps import CompiledSteps, StepPlan
from jattn.lowering import LoweringProcesses
from jattn.progress import logger
from jattn.step_compilation import Compilation, steps_in_turn

THREAD = "jattn-compile"  # how the names of the threads that compile here begin
_AT_ONCE = 1  # XLA tries each product in memory that is spared for one at a time


@dataclasses.dataclass
class BackgroundCompilation:
    """What is still to be compiled.

    Attributes:
        left: Steps that are neither compiled nor given up.
        failed: Why those that were given up were, by key; launches go on taking the next larger step.
    """

    left: int
    failed: dict[Hashable, str] = dataclasses.field(default_factory=dict)
    _stopping: threading.Event = dataclasses.field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _processes: LoweringProcesses | None = None

    def start(
        self,
        plans: Mapping[Hashable, StepPlan],
        add: Callable[[CompiledSteps], None],
        processes: LoweringProcesses,
    ) -> None:
        """Begins.

        Args:
            add: Takes each step once it is compiled, in the thread.
            processes: That lower them; closed in the end.
        """
        self._processes = processes
        self._thread = threading.Thread(target=self._run, args=(dict(plans), add, processes), name=THREAD, daemon=True)
        atexit.register(self._end)
        self._thread.start()
        logger.info("Compiling %d more steps in the background; larger ones serve until they are there", len(plans))

    def stop(self) -> None:
        """Compiles no step after the one under way; does not wait for that."""
        self._stopping.set()
        if self._processes is not None:
            self._processes.close()

    def _end(self) -> None:
        """Stops, and waits for the step under way: an interpreter that goes meanwhile dies of it."""
        self.stop()
        self.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether all is done within so many seconds, or as long as it takes."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.left == 0

    def _run(
        self,
        plans: dict[Hashable, StepPlan],
        add: Callable[[CompiledSteps], None],
        processes: LoweringProcesses,
    ) -> None:
        start, num_plans = time.perf_counter(), len(plans)
        in_turn = steps_in_turn(plans, processes=processes, at_once=_AT_ONCE)
        with contextlib.closing(processes), contextlib.closing(in_turn), contextlib.ExitStack() as stack:
            stack.callback(atexit.unregister, self._end)
            try:
                for key, compilation in in_turn:
                    self._take(key, compilation, add)
                    if self._stopping.is_set():
                        break
            except RuntimeError as error:
                if threading.main_thread().is_alive() and "shutdown" not in str(error):
                    raise
                return  # the interpreter ends, and lets nothing begin
        if self._stopping.is_set():
            return
        logger.info(
            "Compiled in the background: %d of %d steps in %.1f s",
            num_plans - len(self.failed),
            num_plans,
            time.perf_counter() - start,
        )

    def _take(self, key: Hashable, compilation: Compilation, add: Callable[[CompiledSteps], None]) -> None:
        """Hands a step on, or notes why there is none."""
        try:
            step, record = compilation.result()
            add(CompiledSteps({key: step}, {key: record}))
        except Exception as error:  # a smaller step is not needed to serve
            if not threading.main_thread().is_alive():
                return
            self.failed[key] = " ".join(str(error).split()) or type(error).__name__
            logger.error("The step %s cannot be compiled; a larger one serves in its place", key, exc_info=error)
        self.left -= 1
