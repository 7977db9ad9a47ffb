"""Streamed answers of a server, read by threads: whole ones, and those that are cut."""

import contextlib
import http.client
import json
import threading


class Stream(threading.Thread):
    """A streamed answer; `is_whole` once it has come to its end, and `error` if it was cut."""

    def __init__(self, port, max_tokens):
        super().__init__()
        self.begun, self.text, self.error = threading.Event(), "", None
        self._port, self._max_tokens = port, max_tokens

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        asked = {"prompt": "import os\n", "max_tokens": self._max_tokens, "temperature": 0, "ignore_eos": True}
        content, headers = json.dumps(asked | {"stream": True}), {"Content-Type": "application/json"}
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", content, headers)
            try:
                response = connection.getresponse()
                self.status = response.status
                while piece := response.read1():
                    self.begun.set()
                    self.text += piece.decode()
            except http.client.HTTPException as error:
                self.error = error
        self.begun.set()

    @property
    def is_whole(self):
        return self.error is None and self.text.endswith("data: [DONE]\n\n")


def shown(text):
    """The text of a stream of events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)
