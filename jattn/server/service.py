"""Service: what all routes share: the model, the engine's thread, and who waits for which of its requests."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jattn.device_mesh import spans_processes
from jattn.server.bodies import shortened
from jattn.server.errors import ApiError
from jattn.server.metrics import Metrics
from jattn.server.output_stream import OutputStream
from jattn.serving.engine_thread import EngineThread, StepReport
from jattn.serving.frontend.llm import LLM
from jattn.serving.request import Request

_RETRY_SECONDS = 5


def shutting_down() -> ApiError:
    """What requests get that come while the server ends, or run for longer than it waits."""
    return ApiError(503, "The server is shutting down.", retry_after=_RETRY_SECONDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What a server is told that its engine need not know.

    Attributes:
        model_names: What clients may call the model; the first is what it calls itself.
        api_keys: One of them must come with each request; none lets everybody in.
        chat_template: In place of the checkpoint's.
        enable_auto_tool_choice: Whether models may call tools where they do not have to.
        tool_call_parser, reasoning_parser: Names of what reads calls and reasoning (`jattn/server/tools/registry.py`).
        max_queued: Sequences that may wait beyond those that run at once.
        max_body_bytes: Of a request.
        keep_alive_seconds: After so long without an event a stream sends a comment.
        slow_client_seconds: A client that takes nothing of its stream for so long is cut off.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    max_queued: int = 4096
    max_body_bytes: int = 32 * 2**20
    keep_alive_seconds: float = 15.0
    slow_client_seconds: float = 60.0


class Service:
    """Serves one model to many clients, all but the engine in the thread of the event loop.

    Args:
        llm: A loaded checkpoint; nobody else uses its engine from now on.

    Raises:
        NotImplementedError: Several processes share the model.

    Attributes:
        draining: Whether it takes no more requests, as it is about to end.
    """

    def __init__(self, llm: LLM, options: ServiceOptions):
        if spans_processes(llm.engine.config.parallel):
            raise NotImplementedError(
                "A server's model must be of one process, as clients would ask one of several alone; `LLM.generate` "
                f"serves them all. Got tensor_parallel={llm.engine.config.tensor_parallel} over processes."
            )
        self.llm = llm
        self.options = options
        self.thread = EngineThread(llm.engine, self._deliver)
        self.metrics = Metrics(options.model_names[0], llm.engine, self.thread)
        self.draining = False
        self.created = int(time.time())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[Request, OutputStream] = {}

    def start(self) -> None:
        """Begins to serve, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    @property
    def num_unfinished(self) -> int:
        """Sequences that are waited for."""
        return len(self._streams)

    def model_name(self, body: dict[str, Any]) -> str:
        """What the client calls the model.

        Raises:
            ApiError: It is another one (404).
        """
        name = body.get("model", self.options.model_names[0])
        if name not in self.options.model_names:
            raise ApiError(404, f"The model {shortened(name)} does not exist.", param="model")
        return name

    def check_serving(self) -> None:
        """Says whether requests are served at all.

        Raises:
            ApiError: They are not (503).
        """
        if self.thread.death is not None:
            raise ApiError(503, self.thread.death)
        if self.draining:
            raise shutting_down()

    @contextlib.asynccontextmanager
    async def serve(self, of_prompts: Sequence[Sequence[Request]]) -> AsyncIterator[OutputStream]:
        """Serves requests while the context lasts; those that have not ended by then are aborted.

        Raises:
            ApiError: There are too many, or the server ends (503).
        """
        requests = [request for of_prompt in of_prompts for request in of_prompt]
        self.check_serving()
        most = self.llm.engine.config.max_num_seqs + self.options.max_queued
        if len(self._streams) + len(requests) > most:
            self.metrics.rejected("queue_full")
            raise ApiError(
                503,
                f"At most {most} sequences are served or wait at once, and {len(self._streams)} are. Try again later.",
                retry_after=_RETRY_SECONDS,
            )
        stream = OutputStream(of_prompts, self.llm.tokenizer)
        for of_prompt in of_prompts:
            self.metrics.arrived(of_prompt)
        try:
            self._streams |= dict.fromkeys(requests, stream)
            self.thread.add(requests)
            yield stream
        finally:
            stream.close()
            if aborted := [request for request in requests if self._streams.pop(request, None)]:
                self.thread.abort(aborted)
                for request in aborted:
                    self.metrics.ended(request, "abort")

    def fail_all(self, error: ApiError) -> None:
        """Ends all answers with an error, after what they have."""
        for stream in set(self._streams.values()):
            stream.fail(error)

    def _deliver(self, report: StepReport) -> None:
        """In the engine's thread: wakes the event loop once."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._fan_out, report)

    def _fan_out(self, report: StepReport) -> None:
        now = time.monotonic()
        self.metrics.stepped(report, now)
        stopped = []
        for progress in report.progress:
            request = progress.request
            stream = self._streams.get(request)
            if stream is None:  # it was aborted meanwhile
                continue
            self.metrics.progressed(progress, now)
            at_stop_string = stream.take(progress)
            if at_stop_string:
                stopped.append(request)
            if at_stop_string or progress.finish_reason is not None:
                del self._streams[request]
                self.metrics.ended(request, progress.finish_reason or "stop")
        if stopped:
            self.thread.abort(stopped)
