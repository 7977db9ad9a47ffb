"""Routes beside the completions, errors of all of them, and golden transcripts of streams."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jattn.server import answers
from jattn.server.chat_prompt import chat_text
from jattn.server.service import Service, ServiceOptions
from jattn.serving.frontend.chat import ChatTemplate
from tests.jattn.harness.http_server import CHAT, GREEDY, MODEL, PROMPT

GOLDEN = Path(__file__).parent / "golden" / "server_streams.json"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

STREAMS = {
    "completion": (COMPLETIONS, {**GREEDY, "max_tokens": 4, "stream_options": {"include_usage": True}}),
    "completion_echo_logprobs": (COMPLETIONS, {**GREEDY, "max_tokens": 2, "echo": True, "logprobs": 0}),
    "completion_stop": (COMPLETIONS, {**GREEDY, "stop": [" sys"]}),
    "chat": (CHATS, {**CHAT, "max_tokens": 4, "stream_options": {"include_usage": True}}),
    "chat_several": (CHATS, {**CHAT, "max_tokens": 2, "n": 2}),
    "completion_of_vllm_bench": (
        COMPLETIONS,
        {
            "model": MODEL,
            "prompt": PROMPT,
            "repetition_penalty": 1.0,
            "temperature": 0.0,
            "max_tokens": 3,
            "logprobs": 1,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "chat_of_aiperf": (
        CHATS,
        {
            "messages": CHAT["messages"],
            "model": MODEL,
            "max_completion_tokens": 3,
            "temperature": 0,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
        },
    ),
    "chat_of_langchain": (CHATS, {**CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}),
}


def transcript(server, path, body):
    """Each event as it is sent, but for what differs from call to call."""
    with server.response("POST", path, body | {"stream": True, "request_id": "golden"}) as response:
        content = response.read().decode()
    content = re.sub(r'"created":\d+', '"created":0', content)
    content = re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", content)
    return content.removesuffix("\n\n").split("\n\n")


@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_as_recorded(http_server, monkeypatch, name):
    """Byte by byte, each choice for itself: which goes first in a step depends on the rows that are free.

    `merged` would make one event of what comes while the loop is busy.
    """
    monkeypatch.setattr(answers, "merged", list)
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
    assert sorted(transcript(http_server, *STREAMS[name]), key=choice) == sorted(expected, key=choice)


def choice(event):
    """The number of an event's choice; of one without choices, what comes after all."""
    number = re.search(r'"choices":\[\{"index":(\d+)', event)
    return int(number[1]) if number else 99


REFUSED = {
    "no_json": (COMPLETIONS, b"{", 400, "The body must be JSON: "),
    "no_utf8": (COMPLETIONS, b'{"prompt": "\xff"}', 400, "The body must be JSON: "),
    "no_object": (COMPLETIONS, [1], 400, "The body must be a JSON object. Got list."),
    "deep": (COMPLETIONS, b"[" * 100_000, 400, "The body must be JSON: "),
    "no_prompt": (COMPLETIONS, {}, 400, "`prompt` must be a text, token ids, or a list of either. Got None."),
    "prompt_of_floats": (COMPLETIONS, {"prompt": [[1.5]]}, 400, "Token ids must be whole numbers"),
    "no_token": (COMPLETIONS, {"prompt": [99999]}, 400, "Token ids must be whole numbers"),
    "empty": (COMPLETIONS, {"prompt": []}, 400, "`prompt` must be"),
    "too_long": (COMPLETIONS, {"prompt": [5] * 256}, 400, "A prompt must leave room for a token in the context of 256"),
    "surrogate": (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "`text` must be valid Unicode."),
    "temperature": (COMPLETIONS, {**GREEDY, "temperature": -1}, 400, "`temperature` must be finite and at least 0"),
    "nan": (COMPLETIONS, b'{"prompt": "x", "top_p": NaN}', 400, "`top_p` must be above 0 and at most 1"),
    "n": (COMPLETIONS, {**GREEDY, "n": 129}, 400, "`n` must be at most 128. Got 129."),
    "best_of": (COMPLETIONS, {**GREEDY, "best_of": 2}, 400, "`best_of` must be `n`"),
    "suffix": (COMPLETIONS, {**GREEDY, "suffix": "x"}, 400, "`suffix` is not served here: leave it out. Got 'x'."),
    "max_tokens": (COMPLETIONS, {**GREEDY, "max_tokens": "7"}, 400, "`max_tokens` must be a whole number. Got '7'."),
    "logprobs": (COMPLETIONS, {**GREEDY, "logprobs": 21}, 400, "`logprobs` must be at most 20. Got 21."),
    "seed": (COMPLETIONS, {**GREEDY, "seed": 0.5}, 400, "`seed` must be a whole number. Got 0.5."),
    "stream": (COMPLETIONS, {**GREEDY, "stream": 1}, 400, "`stream` must be true or false. Got 1."),
    "usage": (COMPLETIONS, {**GREEDY, "stream_options": {"include_usage": True}}, 400, "`stream_options` needs `st"),
    "model": (COMPLETIONS, {**GREEDY, "model": "gpt"}, 404, "The model 'gpt' does not exist."),
    "model_type": (CHATS, {**CHAT, "model": [1]}, 404, "The model [1] does not exist."),
    "no_messages": (CHATS, {}, 400, "`messages` must be a list of at least one message. Got None."),
    "image": (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "Each part of a"),
    "tools": (CHATS, {**CHAT, "tools": [{"type": "function"}]}, 400, "Each of `tools` must be"),
    "format": (CHATS, {**CHAT, "response_format": {"type": "x"}}, 400, "`response_format` must have the type"),
    "no_format": (CHATS, {**CHAT, "response_format": {"json_schema": {}}}, 400, "`response_format` must have the type"),
    "top_logprobs": (CHATS, {**CHAT, "top_logprobs": 2}, 400, "`top_logprobs` needs `logprobs`. Got 2."),
    "variable": (CHATS, {**CHAT, "chat_template_kwargs": {"x": 1}}, 400, "The chat template has no variable `x`."),
    "tokens": ("/detokenize", {"tokens": [-1]}, 400, "`tokens` must be whole numbers at least 0 and below 2048"),
    "nothing": ("/tokenize", {}, 400, "`prompt` or `messages` must be given. Got neither."),
    "no_route": ("/v2/completions", GREEDY, 404, "POST /v2/completions: Not Found."),
    "no_method": ("/v1/models", {}, 405, "POST /v1/models: Method Not Allowed."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_told_in_a_sentence(http_server, name):
    path, body, status, sentence = REFUSED[name]
    got, _, content = http_server.call("POST", path, body)
    assert got == status
    error = content["error"]
    assert error["message"].startswith(sentence)
    assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, status)
    assert error["type"] == {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowedError"}[status]


def test_models_are_listed_by_their_names(http_server):
    _, _, content = http_server.call("GET", "/v1/models")
    assert [card["id"] for card in content["data"]] == [MODEL, "other-name"]
    assert {card["max_model_len"] for card in content["data"]} == {256}
    assert http_server.call("GET", f"/v1/models/{MODEL}")[2] == content["data"][0]
    assert http_server.call("GET", "/v1/models/gpt")[0] == 404


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
def test_health_is_an_empty_answer(http_server, method, path):
    assert http_server.call(method, path)[::2] == (200, b"")


def test_version_is_the_packages(http_server):
    assert set(http_server.call("GET", "/version")[2]) == {"version"}


def test_tokens_come_back_as_their_text(http_server):
    found = http_server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 256
    bare = http_server.post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False})
    assert found["tokens"][1:] == bare["tokens"]
    assert http_server.post("/detokenize", {"tokens": bare["tokens"]}) == {"prompt": PROMPT}
    chat = http_server.post("/tokenize", {"messages": CHAT["messages"]})
    assert http_server.post("/detokenize", {"tokens": chat["tokens"]}) == {"prompt": "# user: import os\n#"}


def test_tokenizer_info_has_the_special_tokens(http_server):
    assert http_server.call("GET", "/tokenizer_info")[2]["eos_token"] == "<|endoftext|>"


def test_a_prompt_seen_before_is_cached_until_the_reset(http_server):
    """But for its last page, of which a token must be computed."""
    body = GREEDY | {"prompt": list(range(100, 133)), "max_tokens": 1}

    def cached(**more):
        answer = http_server.post(COMPLETIONS, body | more)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(), cached(), cached(cache_salt="mine"), cached(cache_salt="mine")] == [0, 32, 0, 32]
    http_server.wait_until_idle()
    assert http_server.call("POST", "/reset_prefix_cache")[::2] == (200, b"")
    assert cached() == 0


def samples(server):
    """Values of the metrics by name, and by what is labelled beside model and engine; but for the buckets."""
    _, headers, content = server.call("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(content.decode()):
        for sample in family.samples:
            labels = sample.labels
            assert (labels.pop("model_name"), labels.pop("engine")) == (MODEL, "0")
            if "le" not in labels:
                found[" ".join([sample.name, *labels.values()])] = sample.value
    return found


def test_metrics_count_under_the_names_of_vllm(http_server):
    before = samples(http_server)
    http_server.post(COMPLETIONS, GREEDY | {"n": 2})
    http_server.events(COMPLETIONS, GREEDY | {"stop": " sys"})
    http_server.wait_until_idle()
    after = {name: value - before.get(name, 0) for name, value in samples(http_server).items()}
    counts = {
        "prompt_tokens_total": 12,
        "generation_tokens_total": 22,
        "prefix_cache_queries_total": 12,
        "prefix_cache_hits_total": 0,
        "prompt_tokens_cached_total": 0,
        "time_to_first_token_seconds_count": 3,
        "inter_token_latency_seconds_count": 19,
        "e2e_request_latency_seconds_count": 3,
        "request_queue_time_seconds_count": 3,
        "request_generation_tokens_sum": 22,
        "request_params_n_sum": 3,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "request_success_total length": 2,
        "request_success_total stop": 1,
        "corrupted_requests_total": 0,
    }
    assert {name: after.get(f"vllm:{name}") for name in counts} == counts
    assert after["jattn:step_seconds_count"] > 10
    assert after["jattn:launches_total"] >= after["jattn:launches_found_idle_total"] >= 0
    least, most = (after[f"jattn:device_idle_seconds_at_{bound}_total"] for bound in ("least", "most"))
    assert 0 <= least <= most
    assert after["jattn:launches_total"] > 10
    assert 0 < after["jattn:host_seconds_total"] < after["jattn:step_seconds_sum"]


def test_serving_compiles_nothing(http_server):
    before = samples(http_server)["jattn:compiles_total"]
    http_server.events(COMPLETIONS, {**GREEDY, "n": 3, "temperature": 1, "presence_penalty": 1, "logprobs": 1})
    assert samples(http_server)["jattn:compiles_total"] == before
    http_server.on_engine(lambda _: jax.jit(lambda x: x + 3)(np.zeros(3, np.float32)))
    assert samples(http_server)["jattn:compiles_total"] > before


def test_chat_of_a_model_without_a_template_says_what_it_needs(tmp_path):
    service: Any = object.__new__(Service)
    service.llm = SimpleNamespace(chat_template=ChatTemplate(tmp_path))
    service.options = ServiceOptions(model_names=(MODEL,))
    with pytest.raises(ValueError, match=r"^The model has no chat template, .* by `--chat-template`\.$") as caught:
        chat_text(service, dict(CHAT))
    assert str(tmp_path) not in str(caught.value)
