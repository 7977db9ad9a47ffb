"""The load of a benchmark: what is asked, a client that reads any server's stream, and figures of what came."""

import contextlib
import http.server
import json
import threading

import numpy as np
import pytest

from jattn.load.client import Answer, Client
from jattn.load.figures import figures
from jattn.load.run import measured
from jattn.load.steady import SteadyPart
from jattn.load.workload import Level, Workload

WORKLOAD = Workload(input_len=10, output_len=6, spread=0.5, prefix_len=3, vocab_size=50)


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers completions with what the test has put on the class: status, type and pieces, written one by one."""

    protocol_version = "HTTP/1.1"
    status, kind, pieces, bodies = 200, "text/event-stream", (), []

    def do_GET(self):
        content = json.dumps({"data": [{"id": "some-model"}]}).encode()
        self._send(200, "application/json", [content])

    def do_POST(self):
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._send(self.status, self.kind, self.pieces)

    def _send(self, status, kind, pieces):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in (*pieces, b""):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def scripted(**answer):
    handler = type("Handler", (Scripted,), {"bodies": [], **answer})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", handler
        finally:
            server.shutdown()
            thread.join()


def token(text="a"):
    return f'data: {{"choices": [{{"text": "{text}"}}]}}\n\n'.encode()


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_prompts_have_the_lengths_that_were_asked_for_and_begin_alike():
    prompts = WORKLOAD.prompts(200)
    lengths = [len(ids) - 3 for ids, _ in prompts]
    outputs = [num_tokens for _, num_tokens in prompts]
    assert (min(lengths), max(lengths), min(outputs), max(outputs)) == (5, 15, 3, 9)
    assert len({tuple(ids[:3]) for ids, _ in prompts}) == 1
    assert len({tuple(ids[3:8]) for ids, _ in prompts}) == 200
    assert {i for ids, _ in prompts for i in ids} == set(range(50))
    assert WORKLOAD.longest == 3 + 15 + 9
    assert WORKLOAD.prompts(2) == WORKLOAD.prompts(2)


def test_gaps_of_an_open_loop_are_those_of_a_poisson_process():
    gaps = np.array(Level(num_prompts=4000, rate=20.0).gaps(seed=0))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.1)
    assert set(Level(num_prompts=3, rate=float("inf")).gaps(seed=0)) == {0.0}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Workload(input_len=0), "`input_len` must be at least 1. Got 0."),
        (lambda: Workload(spread=1.5), "`spread` must be a number from 0 to 1. Got 1.5."),
        (lambda: Level(num_prompts=1), "`concurrency` or `rate` must be given, and not both."),
        (lambda: Level(num_prompts=1, concurrency=0), "must be at least 1"),
        (lambda: Level(num_prompts=1, rate=float("nan")), "`rate` must be a number above 0, or inf. Got nan."),
        (lambda: Client("localhost:8000"), "`url` must be as http://127.0.0.1:8000. Got 'localhost:8000'."),
    ],
)
def test_bad_input_is_a_sentence(make, said):
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        make()


@pytest.mark.parametrize(
    "pieces",
    [
        [token(), token(), token() + token(), USAGE + DONE],
        [token() * 4 + USAGE + DONE],
        [b": keep-alive\n\n", token() * 2, token()[:9], token()[9:] + token(), USAGE[:-1], b"\n" + DONE],
        [(token() * 4).replace(b"\n", b"\r\n"), (USAGE + DONE).replace(b"\n", b"\r\n")],
    ],
)
def test_stream_is_read_however_it_is_cut(pieces):
    with scripted(pieces=pieces) as (url, handler):
        row = measured(url, WORKLOAD, Level(num_prompts=5, concurrency=2), warm_up=1)
    assert (row["requests"], row["failed"], row["output_tokens"]) == (5, 0, 5 * 5)
    assert row["ttft_ms"]["p50"] <= row["e2e_ms"]["p50"]
    first, *asked = handler.bodies
    assert first["max_tokens"] == 2
    assert sorted((tuple(a["prompt"]), a["max_tokens"]) for a in asked) == sorted(
        (tuple(ids), num_tokens) for ids, num_tokens in WORKLOAD.prompts(5)
    )
    assert asked[0].items() >= {"model": "some-model", "ignore_eos": True, "stream": True}.items()


def test_server_that_counts_no_tokens_is_counted_by_its_events():
    with scripted(pieces=[token() * 3, DONE]) as (url, _):
        row = measured(url, WORKLOAD, Level(num_prompts=4, rate=float("inf")), warm_up=0)
    assert (row["output_tokens"], row["rate"], row["failed"]) == (12, "inf", 0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"status": 503, "pieces": [b'{"error": {"message": "Too many."}}']}, "Status 503: Too many."),
        ({"pieces": [token(), b'data: {"error": {"message": "It broke."}}\n\n', DONE]}, "It broke."),
        ({"pieces": [b"data: {not JSON\n\n", DONE]}, "must end with an event of JSON. Got  {not JSON"),
        ({"pieces": [USAGE, DONE]}, "has no token"),
        ({"kind": "text/plain", "pieces": [b"hello"]}, "must end with an event of JSON. Got hello"),
    ],
)
def test_failures_are_counted_and_told(answer, said):
    with scripted(**answer) as (url, _):
        row = measured(url, WORKLOAD, Level(num_prompts=3, concurrency=3), warm_up=0)
        assert (row["failed"], row["output_tokens"], row["ttft_ms"]) == (3, 0, None)
        ((error, count),) = row["errors"].items()
        assert said in error
        assert count == 3
        with pytest.raises(ValueError, match="The server must answer the requests"):
            measured(url, WORKLOAD, Level(num_prompts=3, concurrency=3))


def test_server_that_is_not_there_is_told():
    with pytest.raises(ValueError, match=r"No connection to 127.0.0.1:9: .*refused"):
        measured("http://127.0.0.1:9", WORKLOAD, Level(num_prompts=1, concurrency=1))


def test_figures_of_known_times():
    def answer(sent, times, num_tokens):
        made = Answer()
        made.sent, made.times, made.num_tokens = sent, times, num_tokens
        return made

    answers = [answer(0.0, [1.0, 1.5, 2.0], 3), answer(1.0, [1.25], 1), Answer()]
    answers[2].error = "gone"
    row = figures(Level(num_prompts=3, concurrency=2), answers, [10, 20, 40], seconds=2.0)
    assert row["ttft_ms"]["mean"] == 625
    assert row["itl_ms"] == {"mean": 500, "p50": 500, "p90": 500, "p99": 500}
    assert row["tpot_ms"]["p99"] == 500
    assert row["e2e_ms"]["p50"] == 1125
    assert (row["requests_per_s"], row["output_tokens_per_s"], row["total_tokens_per_s"]) == (1, 2, 17)
    assert (row["failed"], row["errors"]) == (1, {"gone": 1})


def steady_part(looks, most_running):
    """One that has looked at these moments: (time, requests that run, idle seconds at least, at most)."""
    now = iter([seconds for seconds, *_ in looks])
    found = iter([tuple(rest) for _, *rest in looks])
    part = SteadyPart(lambda: next(found), most_running, lambda: next(now))
    for _ in looks:
        part.look()
    return part.idle_shares()


def test_steady_part_is_from_the_first_to_the_last_moment_at_which_all_run():
    looks = [(0, 1, 0.0, 0.0), (1, 4, 0.5, 0.9), (2, 3, 0.7, 1.2), (5, 4, 0.9, 1.7), (9, 2, 4.0, 5.0)]
    assert steady_part(looks, 4) == pytest.approx((4.0, 0.1, 0.2))
    assert steady_part(looks, 3) == pytest.approx((4.0, 0.1, 0.2))
    assert steady_part(looks[:3], 4) is None  # one moment is no time
    assert steady_part(looks, 5) is None


def test_steady_part_looks_on_its_own_while_it_lasts():
    looked = threading.Event()

    def look():
        looked.set()
        return 1, 0.0, 0.0

    with SteadyPart(look, 1):
        assert looked.wait(10)
    looked.clear()
    assert not looked.wait(0.1)
