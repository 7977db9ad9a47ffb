"""The server on a port of this machine, in threads, over the bundled checkpoint; and a client of the standard library.

Its texts are greedy or seeded, so that what is served is compared to what `LLM` gives.
"""

import contextlib
import http.client
import json
import threading
from importlib.metadata import entry_points

import jattn
from jattn.server.run import Lifetime, Server, bound_socket
from jattn.server.service import Service, ServiceOptions
from tests.careful import compiled_with_care

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}#{% endif %}"
)
MODEL = "stdlib-llama"
PROMPT = "import os\n"
GREEDY = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
CHAT = {**GREEDY, "messages": [{"role": "user", "content": "import os"}]}
del CHAT["prompt"]


def bundled_llm():
    """One bucket of each step, none for greedy requests, all compiled with care: they run for thousands of tokens."""
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    sizes = {"max_num_seqs": 4, "max_context_len": 256, "prefill_tokens": 64, "smallest_decode_bucket": 4}
    with compiled_with_care():
        return jattn.LLM(point.load()(), **sizes, greedy_steps=False, structured_steps=True, progress=False)


class HttpServer:
    """A running server.

    Args:
        options: Of `ServiceOptions`, but the names.
        lifetime: Of `Lifetime`.

    Attributes:
        service: What it serves with.
        server: uvicorn's.
    """

    def __init__(self, llm, options=None, **lifetime):
        options = {"chat_template": TEMPLATE} | (options or {})
        self.service = Service(llm, ServiceOptions(model_names=(MODEL, "other-name"), **options))
        ready = threading.Event()
        self.server = Server(self.service, Lifetime(**lifetime), ready.set)
        listening = bound_socket("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]})
        self._thread.start()
        assert ready.wait(60)

    def stop(self):
        self.server.should_exit = True
        self.join()
        assert not self.service.thread.is_running

    def join(self):
        """Waits until it has ended by itself."""
        self._thread.join(60)
        assert not self._thread.is_alive()

    @contextlib.contextmanager
    def asked(self, method, path, body=None, headers=()):
        """A connection on which a request was sent, JSON, bytes or an iterator of them; leaving closes it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = json.dumps(body).encode() if isinstance(body, dict | list) else body
            connection.request(method, path, content, dict(headers))
            yield connection
        finally:
            connection.close()

    @contextlib.contextmanager
    def response(self, method, path, body=None, headers=()):
        """A response, whose body is still to be read; leaving closes the connection."""
        with self.asked(method, path, body, headers) as connection, connection.getresponse() as response:
            yield response

    def call(self, method, path, body=None, headers=()):
        """Status, headers and content, as JSON if it is that."""
        with self.response(method, path, body, headers) as response:
            content = response.read()
            is_json = response.headers.get("content-type") == "application/json"
            return response.status, response.headers, json.loads(content) if is_json else content

    def post(self, path, body, headers=()):
        """What an answer of status 200 holds."""
        status, _, content = self.call("POST", path, body, headers)
        assert status == 200, content
        return content

    def events(self, path, body):
        """The events of a stream that ends as it should."""
        with self.response("POST", path, body | {"stream": True}) as response:
            assert response.status == 200
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            *events, done, rest = response.read().decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events if event != ": keep-alive"]

    def on_engine(self, function):
        """What a function of the engine returns, called between two steps."""
        return self.service.thread.call(function).result(60)

    def wait_until_idle(self):
        """Until nothing is left of any request."""
        for _ in range(200):
            idle = self.on_engine(lambda engine: not engine.has_work and engine.kv_cache)
            if idle and not self.service.num_unfinished:
                assert idle.num_free == idle.num_pages
                return
            threading.Event().wait(0.05)
        raise AssertionError(f"{self.service.num_unfinished} sequences are left")
