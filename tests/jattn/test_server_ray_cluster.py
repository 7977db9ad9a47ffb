"""Applications on a Ray cluster of this machine: one deployed anew, one that grows with its load, one with a front."""

import http.client
import json
import threading
import time
import urllib.request

import pytest

from jattn.server.ray import application
from jattn.server.run import bound_socket
from jattn.server.service import ServiceOptions
from tests.jattn.harness.clients import checkpoint
from tests.jattn.harness.streams import Stream, shown

SIZES = {"max_context_len": 1024, "prefill_tokens": 64, "greedy_steps": False, "full_sampling": False}


class Cluster:
    """Ray Serve on this machine.

    Attributes:
        port: Of its proxy.
    """

    def __init__(self, ray, port):
        self._ray, self.port = ray, port

    def deploy(self, *, name="m", **arguments):
        served = application(checkpoint(), ServiceOptions(model_names=(name,)), **SIZES, **arguments)
        self._ray.serve.run(served, name="jattn", route_prefix="/")

    def num_running(self):
        """Replicas that serve."""
        (deployed,) = self._ray.serve.status().applications.values()
        return deployed.deployments["jattn"].replica_states.get("RUNNING", 0)

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return answer.read().decode()

    def complete(self, prompt):
        body = json.dumps({"prompt": prompt, "max_tokens": 4, "temperature": 0}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", body)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def begun(self, number, max_tokens):
        """So many streams, of which the first has begun."""
        streams = [Stream(self.port, max_tokens) for _ in range(number)]
        for stream in streams:
            stream.start()
        assert streams[0].begun.wait(60)
        return streams


@pytest.fixture
def cluster():
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    with bound_socket("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield Cluster(ray, port)
        serve.shutdown()
    finally:
        ray.shutdown()


def until(is_so, seconds):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_another_version_serves_while_the_streams_of_the_one_before_it_end_whole(cluster):
    """One request runs at a time, so that the last of them outlive the start of the new replica."""
    cluster.deploy(name="first", max_num_seqs=1, drain_seconds=300.0)
    streams = cluster.begun(4, 900)
    waiting = 'vllm:num_requests_waiting{engine="0",model_name="first"} 3.0'
    until(lambda: waiting in cluster.get("/metrics"), 30)
    deploying = threading.Thread(target=cluster.deploy, kwargs={"name": "second", "max_num_seqs": 1})
    deploying.start()
    until(lambda: json.loads(cluster.get("/v1/models"))["data"][0]["id"] == "second", 120)
    assert cluster.complete("import os\n")["model"] == "second"
    assert any(stream.is_alive() for stream in streams)
    for stream in streams:
        stream.join()
    deploying.join()
    assert all(stream.is_whole for stream in streams)
    assert len({shown(stream.text) for stream in streams}) == 1
    assert all('"model":"first"' in stream.text and '"model":"second"' not in stream.text for stream in streams)
    assert cluster.num_running() == 1


@pytest.mark.slow
def test_replicas_come_with_the_load_and_go_with_it(cluster):
    at_once = {"upscale_delay_s": 0.5, "downscale_delay_s": 2.0}
    bounds = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2}
    cluster.deploy(max_num_seqs=1, drain_seconds=300.0, autoscaling=bounds | at_once)
    assert cluster.num_running() == 1
    streams = cluster.begun(8, 500)
    until(lambda: cluster.num_running() == 2, 120)
    for stream in streams:
        stream.join()
    assert all(stream.is_whole for stream in streams)
    until(lambda: cluster.num_running() == 1, 120)
    assert cluster.complete("import os\n")["choices"][0]["text"]


@pytest.mark.slow
def test_a_front_sends_what_begins_alike_to_one_replica(cluster):
    cluster.deploy(max_num_seqs=4, num_replicas=2, by_prefix=True)
    beginnings = [f"# {number} of three modules that begin unlike each other\n" * 8 for number in range(3)]
    for number in range(6):
        usages = [cluster.complete(f"{beginning}import {number}\n")["usage"] for beginning in beginnings]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert all(cached) if number else not any(cached)
    stream = Stream(cluster.port, 60)
    stream.run()
    assert stream.is_whole
    with pytest.raises(urllib.error.HTTPError, match="404"):
        cluster.get("/v1/nothing")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        cluster.complete("import " * 2000)


@pytest.mark.slow
def test_a_client_that_leaves_a_front_takes_its_request_with_it(cluster):
    cluster.deploy(max_num_seqs=1, num_replicas=1, by_prefix=True)
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=60)
    asked = {"prompt": "import os\n", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(asked))
    answer = connection.getresponse()
    assert answer.read1()
    answer.close()
    connection.close()
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 1.0'
    until(lambda: aborted in cluster.get("/metrics"), 60)
