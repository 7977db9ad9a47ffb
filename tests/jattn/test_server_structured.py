"""Structured output over HTTP, streamed and whole, on the bundled checkpoint, which knows nothing of JSON."""

import json
import re

import jsonschema
import pytest

import jattn
from tests.jattn.harness.http_server import CHAT, GREEDY

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}
PATHS = {"/v1/completions": GREEDY, "/v1/chat/completions": CHAT}
SAMPLED = {"max_tokens": 100, "temperature": 1.0, "seed": 3, "ignore_eos": False}
TIGHT = {"disable_any_whitespace": True}


def texts_of(answer):
    choices = answer["choices"]
    return [(c["text"] if "text" in c else c["message"]["content"], c["finish_reason"]) for c in choices]


def streamed(events):
    texts, reasons = {}, {}
    for choice in (choice for event in events for choice in event["choices"]):
        piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + piece
        reasons[choice["index"]] = choice["finish_reason"]
    return [(texts[i], reasons[i]) for i in sorted(texts)]


def fits_schema(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_nested(text):
    return re.fullmatch("[(]*x[)y]*", text) and text.count("(") == len(text) // 2


ASKED = {
    "schema": ({"structured_outputs": {"json": SCHEMA} | TIGHT, "n": 3}, fits_schema),
    "greedy": ({"structured_outputs": {"json": SCHEMA} | TIGHT, "temperature": 0}, fits_schema),
    "penalties": ({"structured_outputs": {"json": SCHEMA} | TIGHT, "presence_penalty": 1.0}, fits_schema),
    "regex": ({"structured_outputs": {"regex": "[ab]{2,5}-[0-9]{1,9}!"}}, re.compile("[ab]{2,5}-[0-9]+!").fullmatch),
    "choice": ({"structured_outputs": {"choice": ["one two", "🙂", "é"]}, "n": 4}, ["one two", "🙂", "é"].__contains__),
    "grammar": ({"structured_outputs": {"grammar": 'start: "x" | "(" start ")" | "(" start "y"'}}, is_nested),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("path", PATHS)
def test_text_has_the_form_that_is_asked_for(http_server, path, asked):
    body, fits = ASKED[asked]
    body = PATHS[path] | SAMPLED | body
    found = texts_of(http_server.post(path, body))
    assert [reason for _, reason in found] == ["stop"] * body.get("n", 1)
    assert all(fits(text) for text, _ in found)
    assert streamed(http_server.events(path, body)) == found


def test_response_format_is_a_schema_or_any_object(http_server):
    named = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    body = CHAT | SAMPLED | {"logit_bias": {str(i): -100 for i in whitespace(http_server)}}
    ((text, reason),) = texts_of(http_server.post("/v1/chat/completions", body | {"response_format": named}))
    assert (reason, fits_schema(text)) == ("stop", True)
    body |= {"response_format": {"type": "json_object"}, "temperature": 0.3}
    ((text, reason),) = texts_of(http_server.post("/v1/chat/completions", body))
    assert (reason, type(json.loads(text))) == ("stop", dict)
    plain = http_server.post("/v1/chat/completions", CHAT)
    assert texts_of(http_server.post("/v1/chat/completions", CHAT | {"response_format": {"type": "text"}})) == (
        texts_of(plain)
    )


def whitespace(http_server):
    tokenizer = http_server.service.llm.tokenizer
    return [i for i in range(1, 2048) if not tokenizer.decode([i]).strip()]


def test_library_gives_what_the_server_gives(http_server):
    form = jattn.StructuredOutputsParams(json=SCHEMA, **TIGHT)
    params = jattn.SamplingParams(max_tokens=100, temperature=1.0, seed=3, n=2, structured_outputs=form)
    body = GREEDY | SAMPLED | {"structured_outputs": {"json": SCHEMA} | TIGHT, "n": 2}
    llm = http_server.service.llm
    (output,) = http_server.on_engine(lambda _: llm.generate(GREEDY["prompt"], params))
    assert [(c.text, c.finish_reason) for c in output.outputs] == texts_of(http_server.post("/v1/completions", body))


def test_text_that_is_cut_is_the_beginning_of_one_with_its_form(http_server):
    """By `max_tokens`, or by a stop string."""
    form = {"structured_outputs": {"regex": "(ab)+c{200}"}}
    ((text, reason),) = texts_of(http_server.post("/v1/completions", GREEDY | form))
    assert (reason, bool(re.fullmatch("(ab)*a?(c*)", text))) == ("length", True)
    form = {"structured_outputs": {"regex": "[ab]x{5}STOPy"}, "stop": "STOP", "max_tokens": 50}
    ((text, reason),) = texts_of(http_server.post("/v1/completions", GREEDY | form))
    assert (reason, text[1:]) == ("stop", "xxxxx")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"structured_outputs": {"regex": "(["}}, "`regex` of `structured_outputs` cannot be served: "),
        ({"structured_outputs": {"json": {"type": "wat"}}}, "Invalid type: wat"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "exactly one of"),
        ({"structured_outputs": {"jsn": SCHEMA}}, "Got 'jsn'"),
        ({"structured_outputs": "a"}, "`structured_outputs` must be an object"),
        ({"response_format": {"type": "json_schema"}}, "`json_schema` must have a `schema`"),
        ({"response_format": {"type": "yaml"}}, "must have the type text, json_object or json_schema. Got 'yaml'"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "exactly one of"),
        ({"guided_json": {}}, "`guided_json` is not served here"),
    ],
)
def test_what_cannot_be_served_is_refused(http_server, body, sentence):
    for path, base in PATHS.items():
        status, _, content = http_server.call("POST", path, base | body)
        assert (status, sentence in content["error"]["message"]) == (400, True), content
