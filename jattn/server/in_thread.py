"""A server in a thread of this process, on a free port of this machine alone."""

import contextlib
import threading
from collections.abc import Iterator

from jattn.server.run import Lifetime, Server, bound_socket, prepare_interpreter, url_of
from jattn.server.service import Service, ServiceOptions
from jattn.serving.frontend.llm import LLM

_STOP_SECONDS = 60.0


@contextlib.contextmanager
def served_in_thread(llm: LLM, options: ServiceOptions) -> Iterator[tuple[str, Service]]:
    """The server's URL and its service, while the context lasts.

    Raises:
        RuntimeError: It ended before it served.
    """
    prepare_interpreter()
    service, ready = Service(llm, options), threading.Event()
    server = Server(service, Lifetime(), ready.set)
    with bound_socket("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="jattn-server")
        thread.start()
        try:
            while not ready.wait(0.1):
                if not thread.is_alive():
                    raise RuntimeError("The server ended before it served.")
            yield url_of(listening), service
        finally:
            server.should_exit = True
            thread.join(_STOP_SECONDS)
