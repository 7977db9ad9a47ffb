"""Replicas on Ray Serve: what is said before any begins, and two of them under load, of which one dies."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from jattn.server import ray as replicas
from jattn.server.ray import Replica, application
from jattn.server.run import bound_socket
from jattn.server.service import ServiceOptions
from tests.jattn.harness.clients import checkpoint
from tests.jattn.harness.fake_llm import run

OPTIONS = ServiceOptions(model_names=("m",))


def test_without_ray_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(NotImplementedError, match=r"^Replicas need Ray: install the extra `jattn\[ray\]`\. Got: "):
        application(checkpoint(), OPTIONS)
    result = run("serve", "--port", 0, "--replicas", 2, checkpoint())
    assert result.exit_code == 2
    assert "install the extra `jattn[ray]`" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_replicas": 0}, "`num_replicas` must be a number of at least 1. Got 0"),
        ({"num_replicas": 2, "autoscaling": {"max_replicas": 3}}, "must not both be given"),
        ({"max_num_seqs": 0}, "`max_num_seqs`"),
    ],
)
def test_what_cannot_be_is_said_before_a_replica_begins(monkeypatch, arguments, sentence):
    monkeypatch.setattr(replicas, "_ray", lambda: None)
    with pytest.raises(ValueError, match=sentence):
        application(checkpoint(), OPTIONS, **arguments)


def test_a_replica_that_cannot_go_on_says_so_to_ray():
    replica = object.__new__(Replica)
    replica._watchdog_seconds = 5.0
    thread = types.SimpleNamespace(death=None, seconds_in_step=1.0)
    replica._service = types.SimpleNamespace(thread=thread)

    def asked():
        with pytest.raises(StopIteration):
            replica.check_health().send(None)

    asked()
    thread.seconds_in_step = 6.0
    with pytest.raises(RuntimeError, match="has not ended in 5 s"):
        asked()
    thread.death = "The engine failed."
    with pytest.raises(RuntimeError, match=r"The engine failed\."):
        asked()


@pytest.fixture(scope="module")
def port():
    """Of two replicas, in a process of their own."""
    pytest.importorskip("ray")
    listening = bound_socket("127.0.0.1", 0)
    number = listening.getsockname()[1]
    listening.close()
    sizes = "--max-num-seqs 4 --max-context-len 256 --prefill-tokens 64"
    command = [Path(sys.executable).with_name("jattn"), "serve", "--replicas", "2", "--port", str(number)]
    with subprocess.Popen([*command, *sizes.split()], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        for line in server.stderr:
            if line.startswith("Serving"):
                break
        yield number
        stream = Stream(number, 200)
        stream.start()
        stream.begun.wait(60)
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert server.returncode == 0
    stream.join()
    assert stream.is_whole  # it drains


def asked(max_tokens):
    return {"prompt": "import os\n", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}


class Stream(threading.Thread):
    """A streamed answer; `is_whole` once it has come to its end, and `error` if it was cut."""

    def __init__(self, port, max_tokens):
        super().__init__()
        self.begun, self.text, self.error = threading.Event(), "", None
        self._port, self._max_tokens = port, max_tokens

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        content, headers = json.dumps(asked(self._max_tokens)), {"Content-Type": "application/json"}
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


def replica_processes():
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if "ray::ServeReplica:jattn" in line]


@pytest.mark.slow
def test_one_replica_dies_under_load_and_the_other_serves_on(port):
    alone = Stream(port, 200)
    alone.start()
    alone.join()
    assert alone.is_whole
    streams = [Stream(port, 200) for _ in range(12)]
    for stream in streams:
        stream.start()
    assert streams[0].begun.wait(60)
    before = replica_processes()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    for stream in streams:
        stream.join()
    whole = [stream for stream in streams if stream.is_whole]
    assert 0 < len(whole) < len(streams)
    assert {shown(stream.text) for stream in whole} == {shown(alone.text)}
    assert all(stream.error or stream.status >= 500 for stream in streams if stream not in whole)
    deadline = time.monotonic() + 120
    while len(set(replica_processes()) - {before[0]}) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def shown(text):
    """The text of a stream of events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)
