"""Replicas on Ray Serve: what is said before any begins, and two of them under load, of which one dies."""

import os
import signal
import subprocess
import sys
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
from tests.jattn.harness.streams import Stream, shown

OPTIONS = ServiceOptions(model_names=("m",))


def test_without_ray_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(NotImplementedError, match=r"^Replicas need Ray: install the extra `jattn\[ray\]`\. Got: "):
        application(checkpoint(), OPTIONS)
    result = run("serve", "--port", 0, "--replicas", 2, checkpoint())
    assert result.exit_code == 2
    assert "install the extra `jattn[ray]`" in result.stderr


def test_a_choice_among_replicas_needs_replicas():
    result = run("serve", "--port", 0, "--by-prefix", checkpoint())
    assert result.exit_code == 2
    assert "`--by-prefix` must come with `--replicas`" in result.stderr


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


@pytest.fixture(scope="module", params=[(), ("--by-prefix",)], ids=["alone", "behind a front"])
def port(request):
    """Of two replicas, in processes of their own."""
    pytest.importorskip("ray")
    listening = bound_socket("127.0.0.1", 0)
    number = listening.getsockname()[1]
    listening.close()
    sizes = "--max-num-seqs 4 --max-context-len 256 --prefill-tokens 64"
    command = [Path(sys.executable).with_name("jattn"), "serve", "--replicas", "2", "--port", str(number)]
    with subprocess.Popen([*command, *sizes.split(), *request.param], stderr=subprocess.PIPE, text=True) as server:
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


def replica_processes():
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    own = [line for line in listed.splitlines() if "ray::ServeReplica:jattn" in line and "-front" not in line]
    return [int(line.split()[0]) for line in own]


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
