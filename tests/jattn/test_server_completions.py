"""Completions over HTTP, streamed and whole, on the bundled checkpoint."""

import dataclasses

import numpy as np
import pytest

import jattn
from tests.jattn.harness.http_server import CHAT, GREEDY, MODEL, PROMPT

BEGIN = "<|endoftext|>"
SAMPLED = {"temperature": 1.0, "seed": 7}
PATHS = {"/v1/completions": GREEDY, "/v1/chat/completions": CHAT}
BODIES = {
    "greedy": {},
    "seed": SAMPLED,
    "several": {**SAMPLED, "n": 3},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {"300": 5.0}, "top_k": -1},
    "stop": {"stop": ["sys"]},
    "stop_kept": {"stop": "sys", "include_stop_str_in_output": True},
    "min_tokens": {"min_tokens": 5, "ignore_eos": False},
}


def assembled(events):
    """The choices of a stream as those of a whole answer: text, why it ended."""
    texts, ends = {}, {}
    for event in events:
        for choice in event["choices"]:
            assert choice["index"] not in ends
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"], choice["stop_reason"]
    return [(texts[index], *ends[index]) for index in sorted(texts)]


def whole(answer):
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    return [(text, c["finish_reason"], c["stop_reason"]) for text, c in zip(texts, choices, strict=True)]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("path", PATHS)
def test_streamed_is_whole(http_server, path, body):
    body = PATHS[path] | BODIES[body]
    answer = http_server.post(path, body)
    *events, last = http_server.events(path, body | {"stream_options": {"include_usage": True}})
    assert assembled(events) == whole(answer)
    assert len(answer["choices"]) == body.get("n", 1)
    assert (last["choices"], last["usage"]) == ([], answer["usage"])
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert not any("usage" in event for event in events)
    assert len({event["id"] for event in [*events, last]}) == 1


def test_greedy_text_is_what_the_library_gives(http_server, library_text):
    assert whole(http_server.post("/v1/completions", GREEDY)) == [(library_text, "length", None)]


def test_prompts_are_texts_or_tokens_one_or_several(http_server):
    tokens = http_server.post("/tokenize", {"prompt": PROMPT})["tokens"]
    (expected,) = whole(http_server.post("/v1/completions", GREEDY))
    for prompt, count in ((tokens, 1), ([PROMPT], 1), ([PROMPT, PROMPT], 2), ([tokens, tokens], 2), ([tokens], 1)):
        assert whole(http_server.post("/v1/completions", GREEDY | {"prompt": prompt})) == [expected] * count
    other = whole(http_server.post("/v1/completions", GREEDY | {"prompt": "class A"}))
    both = GREEDY | {"prompt": ["class A", PROMPT], "n": 2}
    answer = http_server.post("/v1/completions", both)
    assert whole(answer) == [*other * 2, *[expected] * 2]
    assert answer["usage"]["completion_tokens"] == 40
    assert assembled(http_server.events("/v1/completions", both)) == whole(answer)


def test_a_stop_string_ends_the_text_before_it(http_server, library_text):
    stop = library_text[4:7]
    answer = http_server.post("/v1/completions", GREEDY | {"stop": stop})
    assert whole(answer) == [(library_text[: library_text.index(stop)], "stop", stop)]
    assert answer["usage"]["completion_tokens"] < 10


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_gives_the_prompt_before_the_text(http_server, library_text, streamed):
    body = GREEDY | {"echo": True}
    found = assembled(http_server.events("/v1/completions", body)) if streamed else None
    assert (found or whole(http_server.post("/v1/completions", body)))[0][0] == PROMPT + library_text


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_are_of_prompt_and_text(http_server, library_text, streamed):
    body = GREEDY | {"echo": True, "logprobs": 2, "return_token_ids": True}
    if streamed:
        choices = [choice for event in http_server.events("/v1/completions", body) for choice in event["choices"]]
        parts = [choice["logprobs"] for choice in choices]
        found = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        prompt, generated = choices[0]["prompt_token_ids"], [token for c in choices for token in c["token_ids"]]
    else:
        (choice,) = http_server.post("/v1/completions", body)["choices"]
        found, prompt, generated = choice["logprobs"], choice["prompt_token_ids"], choice["token_ids"]
    assert {len(values) for values in found.values()} == {len(prompt) + 10}
    assert "".join(found["tokens"]) == BEGIN + PROMPT + library_text
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert found["text_offset"] == [sum(map(len, found["tokens"][:i])) for i in range(len(found["tokens"]))]
    for name, own, top in list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))[1:]:
        assert top[name] == own <= max(top.values()) < 0
        assert 2 <= len(top) <= 3
    greedy = list(zip(found["token_logprobs"], found["top_logprobs"], strict=True))[len(prompt) :]
    assert all(own == max(top.values()) for own, top in greedy)
    assert len(generated) == 10
    whole_text = BEGIN + PROMPT + library_text
    assert http_server.post("/detokenize", {"tokens": [*prompt, *generated]}) == {"prompt": whole_text}


def test_a_prompt_alone_is_scored_without_a_token(http_server):
    body = GREEDY | {"echo": True, "logprobs": 0, "max_tokens": 0}
    answer = http_server.post("/v1/completions", body)
    (choice,) = answer["choices"]
    assert (choice["text"], answer["usage"]["completion_tokens"]) == (PROMPT, 0)
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_logprobs_have_the_likeliest_first(http_server, streamed):
    body = CHAT | {"logprobs": True, "top_logprobs": 3}
    if streamed:
        choices = [choice for event in http_server.events("/v1/chat/completions", body) for choice in event["choices"]]
        content = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    else:
        content = http_server.post("/v1/chat/completions", body)["choices"][0]["logprobs"]["content"]
    assert len(content) == 10
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        likeliest = [other["logprob"] for other in entry["top_logprobs"]]
        assert likeliest == sorted(likeliest, reverse=True)
        assert len(likeliest) == 3
        assert entry["logprob"] == likeliest[0]


def test_bytes_of_chat_logprobs_are_those_of_the_text(http_server):
    """Of tokens that are a part of a character too, whose text is U+FFFD."""
    body = CHAT | {"logprobs": True, "structured_outputs": {"choice": ["é😀"]}, "max_tokens": 20}
    (choice,) = http_server.post("/v1/chat/completions", body)["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["\N{REPLACEMENT CHARACTER}"] * len(content)
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "é😀" == choice["message"]["content"]


def test_prompt_logprobs_are_by_token_id(http_server):
    body = {"prompt_logprobs": 1}
    (choice,) = http_server.post("/v1/completions", GREEDY | body)["choices"]
    nothing, *found = choice["prompt_logprobs"]
    assert nothing is None
    assert all({"logprob", "rank", "decoded_token"} == set(of) for each in found for of in each.values())
    assert http_server.post("/v1/chat/completions", CHAT | body)["prompt_logprobs"][0] is None


def test_max_tokens_of_any_size_end_with_the_context(http_server):
    answer = http_server.post("/v1/completions", GREEDY | {"prompt": [5] * 250, "max_tokens": 10**400})
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["finish_reason"] == "length"


def test_null_within_stream_options_asks_for_nothing(http_server):
    body = GREEDY | {"stream_options": {"include_usage": None, "continuous_usage_stats": None}}
    assert not any("usage" in event for event in http_server.events("/v1/completions", body))


def test_continuous_usage_counts_each_token(http_server):
    body = GREEDY | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    counts = [event["usage"]["completion_tokens"] for event in http_server.events("/v1/completions", body)]
    assert counts == sorted(counts)
    assert counts[-1] == 10


def test_a_last_message_is_continued(http_server):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "import os\n"}]
    body = CHAT | {"messages": messages, "continue_final_message": True, "return_token_ids": True}
    answer = http_server.post("/v1/chat/completions", body)
    prompt = http_server.post("/detokenize", {"tokens": answer["prompt_token_ids"]})["prompt"]
    assert prompt == "# user: x\n# assistant: import os\n"


@pytest.mark.parametrize(("content", "expected"), [("{{ m.content }}", "end\n"), ("{{ m.content | trim }}", "end")])
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_last_message_ends_where_its_own_text_does(http_server, monkeypatch, content, expected, in_parts):
    """Though the template's own words have it too; and the space at its end stays, if the template keeps it."""
    template = "{% for m in messages %}<start>" + content + "<end>\n{% endfor %}"
    options = dataclasses.replace(http_server.service.options, chat_template=template)
    monkeypatch.setattr(http_server.service, "options", options)
    text = [{"type": "text", "text": "end\n"}] if in_parts else "end\n"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    tokens = http_server.post("/tokenize", {"messages": messages, "continue_final_message": True})["tokens"]
    prompt = http_server.post("/detokenize", {"tokens": tokens})["prompt"]
    assert prompt == "<start>x<end>\n<start>" + expected
    for refused in ([{"role": "assistant", "content": " "}], [{"role": "assistant", "content": []}]):
        body = {"messages": refused, "continue_final_message": True}
        status, _, answer = http_server.call("POST", "/tokenize", body)
        assert (status, answer["error"]["message"][:25]) == (400, "`continue_final_message` ")


def test_names_and_ids_come_back(http_server):
    answer = http_server.post("/v1/completions", GREEDY | {"model": "other-name"}, {"X-Request-Id": "mine"})
    assert (answer["id"], answer["model"], answer["object"]) == ("cmpl-mine", "other-name", "text_completion")
    answer = http_server.post("/v1/chat/completions", CHAT | {"request_id": "r", "user": "u", "unheard_of": [1]})
    assert (answer["id"], answer["model"], answer["object"]) == ("chatcmpl-r", MODEL, "chat.completion")


def test_scores_of_prompts_are_the_librarys(http_server):
    """As lm-eval asks for them: lists of token ids, a token each, and the prompts' log-probabilities."""
    prompts = [list(range(300, 340)), list(range(500, 517))]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    choices = http_server.post("/v1/completions", body)["choices"]
    params = jattn.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    llm = http_server.service.llm
    outputs = http_server.on_engine(lambda _: llm.generate(prompts, params))
    for prompt, choice, output in zip(prompts, choices, outputs, strict=True):
        nothing, *values = choice["logprobs"]["token_logprobs"][:-1]
        expected = [found[token].logprob for token, found in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        assert nothing is None
        np.testing.assert_allclose(values, expected, atol=1e-3)
        greedy = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:-1]]
        likeliest = [max(of.logprob for of in found.values()) for found in output.prompt_logprobs[1:]]
        np.testing.assert_allclose(greedy, likeliest, atol=1e-3)
