"""EngineThread: the one thread that an engine runs in; others ask it by messages, and hear from it once a step."""

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from jattn.progress import logger
from jattn.serving.engine import Engine
from jattn.serving.request import FinishReason, Request, RequestStatus

_FAILURES_IN_A_ROW = 3  # of steps; the engine starts its requests over after each


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a request has come.

    Attributes:
        num_tokens: Of `request.generated`; the thread adds behind them, and leaves those as they are.
        finish_reason: Set the last time that a request is told of.
        error: Why it ended, in a sentence, if the reason is "error".
    """

    request: Request
    num_tokens: int
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What a step did.

    Attributes:
        progress: Of each request that has new tokens or has ended, once.
        started: Requests that got a row and pages for the first time.
        seconds: How long the step took the host, its wait for the device included.
        host_seconds: The same without that wait.
        num_tokens: Tokens that the host has read.
    """

    progress: tuple[Progress, ...]
    started: tuple[Request, ...] = ()
    seconds: float = 0.0
    host_seconds: float = 0.0
    num_tokens: int = 0


class EngineThread:
    """Runs an engine while there is work. Whoever has made a request with `Engine.make_request` adds it here.

    A step that raises loses no request: the engine starts them over. After three in a row the thread is dead: all
    requests end by an error, and so does each that comes.

    Args:
        engine: No other thread steps it from now on.
        deliver: Called in this thread after each step; it must be quick and raise nothing.

    Attributes:
        death: Why the thread serves no more, in a sentence; None while it does.
    """

    def __init__(self, engine: Engine, deliver: Callable[[StepReport], None]):
        self._engine = engine
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[Request, int] = {}  # and how many of its tokens were delivered
        self._not_started: deque[Request] = deque()
        self._failures = 0
        self._stopping = False
        self._step_began: float | None = None
        self.death: str | None = None
        self._thread = threading.Thread(target=self._run, name="jattn-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Ends the thread after the step under way; requests stay where they are.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes.

        Returns:
            Whether it has ended.
        """
        self._inbox.put(self._stop)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests; what becomes of them is delivered."""
        requests = tuple(requests)
        self._inbox.put(lambda: self._add(requests))

    def abort(self, requests: Iterable[Request]) -> None:
        """Ends requests before the next step; nothing more is delivered of them but what is on its way."""
        requests = tuple(requests)
        self._inbox.put(lambda: self._abort(requests))

    def call[Result](self, function: Callable[[Engine], Result]) -> Future[Result]:
        """Calls a function of the engine between two steps."""
        future: Future[Result] = Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self._engine))
                except Exception as error:
                    future.set_exception(error)

        self._inbox.put(answer)
        return future

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def seconds_in_step(self) -> float:
        """How long the step under way has been; 0 if none is."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def count(self) -> tuple[int, int]:
        """How many requests wait, and how many have a row; from any thread, and as of a moment ago."""
        waiting = sum(request.row is None for request in list(self._live))
        return waiting, len(self._live) - waiting

    def _run(self) -> None:
        while not self._stopping:
            self._take_messages()
            if self._engine.has_work and self.death is None and not self._stopping:
                self._step()

    def _take_messages(self) -> None:
        """All there are; waits for one where there is nothing else to do."""
        waits = self.death is not None or not self._engine.has_work
        while not self._stopping:
            try:
                message = self._inbox.get(block=waits)
            except queue.Empty:
                return
            waits = False
            try:
                message()
            except Exception as error:
                self._note_failure(error)

    def _stop(self) -> None:
        self._stopping = True

    def _add(self, requests: tuple[Request, ...]) -> None:
        if self.death is not None:
            self._deliver(StepReport(tuple(Progress(request, 0, "error", self.death) for request in requests)))
            return
        for request in requests:
            self._engine.add(request)
            self._live[request] = 0
            self._not_started.append(request)

    def _abort(self, requests: tuple[Request, ...]) -> None:
        for request in requests:
            self._live.pop(request, None)
        if self.death is None:
            for request in requests:
                self._engine.abort(request)

    def _step(self) -> None:
        restarts = self._failures > 0  # what the call that was cut short had read is told by no event
        stats = self._engine.executor.stats
        waited = stats.waited_seconds
        began = self._step_began = time.monotonic()
        try:
            events = self._engine.step()
            self._failures = 0
        except Exception as error:
            events, restarts = [], True
            self._note_failure(error)
        self._step_began = None
        seconds = time.monotonic() - began
        requests = list(self._live) if restarts else dict.fromkeys(event.request for event in events)
        report = StepReport(
            progress=tuple(found for request in requests if (found := self._progress(request))),
            started=tuple(self._started()),
            seconds=seconds,
            host_seconds=max(0.0, seconds - (stats.waited_seconds - waited)),
            num_tokens=sum(event.token is not None for event in events),
        )
        self._deliver(report)

    def _progress(self, request: Request) -> Progress | None:
        """News of a request, told once."""
        delivered, num_tokens, reason = self._live.get(request), len(request.generated), request.finish_reason
        if delivered is None or (num_tokens == delivered and reason is None):
            return None
        if reason is None:
            self._live[request] = num_tokens
        else:
            del self._live[request]
        return Progress(request, num_tokens, reason, request.error)

    def _started(self) -> Iterable[Request]:
        """Requests start in the order in which they came."""
        waiting = (RequestStatus.NEW, RequestStatus.WAITING)
        while self._not_started and self._not_started[0].status not in waiting:
            yield self._not_started.popleft()

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        logger.error("A step of the engine failed, %d in a row", self._failures, exc_info=error)
        if self._failures == _FAILURES_IN_A_ROW:
            reason = " ".join(str(error).split()) or type(error).__name__
            self.death = f"The engine has stopped after {self._failures} failed steps in a row: {reason}"
            ends = [Progress(request, len(request.generated), "error", self.death) for request in self._live]
            self._live.clear()
            self._deliver(StepReport(tuple(ends)))
