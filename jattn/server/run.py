"""The server as a process: its socket, its signals, and what ends it."""

import asyncio
import contextlib
import dataclasses
import faulthandler
import gc
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from jattn.progress import logger
from jattn.server.app import make_app
from jattn.server.errors import ApiError
from jattn.server.service import Service, ServiceOptions, shutting_down
from jattn.serving.frontend.llm import LLM

# The engine's thread and the event loop share the interpreter: at the default of 5 ms the device waits 7 % of a step.
_SWITCH_SECONDS = 0.0005
# The garbage collector holds all threads up, for a millisecond and now and then for a hundred, and finds next to
# nothing: requests and streams go by their reference counts. By Python's thresholds it took 4 % of the time of 9,000
# tokens a second.
_GC_THRESHOLDS = (20_000, 20, 20)
_LINGER_SECONDS = 5  # for answers to reach their clients once all have ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lifetime:
    """When a server ends.

    Attributes:
        drain_seconds: What running requests get after the first SIGTERM or Ctrl-C; the second ends all at once.
        watchdog_seconds: A step that takes so long hangs; the process then ends, for its supervisor to start it anew.
    """

    drain_seconds: float = 30.0
    watchdog_seconds: float = 300.0


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet: whoever asks before the model is loaded is refused.

    Raises:
        ValueError: The address cannot be had.
    """
    with contextlib.ExitStack() as on_error:
        try:
            if not 0 <= port < 2**16:
                raise OverflowError("ports are 0 to 65535")  # getaddrinfo takes what is left by 65536
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            found = on_error.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # though a server that has ended was there
            found.bind(address)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # or others may bind it until it listens
        except (OSError, OverflowError, UnicodeError) as error:
            raise _no_address(error, host, port) from None
        on_error.pop_all()
        return found


def _listen(bound: socket.socket) -> None:
    """Listens, before uvicorn does: by uvloop it would not tell that it cannot.

    Raises:
        ValueError: Somebody else does.
    """
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.listen()
    except OSError as error:
        raise _no_address(error, *bound.getsockname()[:2]) from None


def _no_address(error: Exception, host: str, port: int) -> ValueError:
    reason = getattr(error, "strerror", None) or error
    return ValueError(f"`--host` and `--port` must be an address to be had: {reason}. Got {host}:{port}.")


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def prepare_interpreter() -> None:
    """Makes the interpreter one of a server, once all is loaded."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # what is loaded stays
    gc.set_threshold(*_GC_THRESHOLDS)


def run(
    llm: LLM, options: ServiceOptions, listening: socket.socket, lifetime: Lifetime, on_ready: Callable[[], None]
) -> bool:
    """Serves until a signal, or the engine's death, ends it.

    Args:
        listening: Where; closed in the end.
        on_ready: Called once requests are served.

    Returns:
        Whether it has ended well: a signal ended it, and the engine's thread has ended too.

    Raises:
        ValueError: Another process listens there by now.
    """
    _listen(listening)
    prepare_interpreter()
    service = Service(llm, options)
    server = Server(service, lifetime, on_ready)
    server.run(sockets=[listening])
    return service.thread.death is None and not service.thread.is_running


class Server(uvicorn.Server):
    """uvicorn's server, which ends when its service has drained or cannot go on.

    Args:
        on_ready: Called once requests are served.
    """

    def __init__(self, service: Service, lifetime: Lifetime, on_ready: Callable[[], None] = lambda: None):
        super().__init__(
            uvicorn.Config(
                make_app(service),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_LINGER_SECONDS,
            )
        )
        self._service = service
        self._lifetime = lifetime
        self._on_ready = on_ready
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of SIGTERM and SIGINT: drains; the second one waits for nobody."""
        if self._deadline is not None:
            self._deadline = 0.0
            return
        self.drain()
        name = signal.Signals(sig).name
        logger.info("%s: ending once what runs has ended; sequences: %d", name, self._service.num_unfinished)

    def drain(self) -> None:
        """Takes no more requests, and ends when those that run have, or their time is up."""
        self._service.draining = True
        self._deadline = time.monotonic() + self._lifetime.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        service = self._service
        if service.thread.seconds_in_step > self._lifetime.watchdog_seconds:
            faulthandler.dump_traceback()
            service.thread.death = f"A step of the engine has not ended in {self._lifetime.watchdog_seconds:g} s."
        if service.thread.death is not None:
            logger.error("%s", service.thread.death)
            await self._end_all(ApiError(503, service.thread.death))
        elif self._deadline is not None and (not service.num_unfinished or time.monotonic() > self._deadline):
            await self._end_all(shutting_down())
        return await super().on_tick(counter)

    async def _end_all(self, error: ApiError) -> None:
        self._service.fail_all(error)
        self.should_exit = True
        await asyncio.sleep(0)  # what waits for the error takes it
