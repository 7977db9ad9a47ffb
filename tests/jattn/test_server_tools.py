"""Tools over HTTP, streamed and whole, on the bundled checkpoint, which is made to call them by grammars."""

import dataclasses
import json

import jsonschema
import pytest

from jattn.server.tools.registry import check_parsers
from tests.jattn.harness.http_server import CHAT
from tests.often import often, slow

CHATS = "/v1/chat/completions"
PLACE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/place"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["here", "there"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a place.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "clock"}},
]
SAMPLED = {**CHAT, "tools": TOOLS, "max_tokens": 150, "temperature": 1.0, "seed": 5, "ignore_eos": False}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '{"name": "weather", "arguments": {"place": "here"}}'
AUTO = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


@pytest.fixture
def told(http_server, monkeypatch):
    """Tells the server what it may be told at start-up."""

    def tell(**options):
        service = http_server.service
        monkeypatch.setattr(service, "options", dataclasses.replace(service.options, **options))
        return http_server

    return tell


def assembled(events):
    """The messages of a stream, and why they ended."""
    messages, reasons = {}, {}
    for choice in (choice for event in events for choice in event["choices"]):
        message, delta = messages.setdefault(choice["index"], {}), choice["delta"]
        for name in ("role", "content", "reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append({"function": {**part["function"]}, "type": part["type"], "id": part["id"]})
                assert part["function"]["arguments"] == ""
            else:
                assert set(part) == {"index", "function"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        reasons[choice["index"]] = choice["finish_reason"]
    return [(messages[i], reasons[i]) for i in sorted(messages)]


def whole(answer):
    return [(choice["message"], choice["finish_reason"]) for choice in answer["choices"]]


def alike(choices):
    """But for the ids of calls, and for what a stream cannot tell."""
    return [
        (
            {name: value for name, value in message.items() if name not in ("tool_calls", "refusal") and value},
            [call["function"] for call in message.get("tool_calls", [])],
            reason,
        )
        for message, reason in choices
    ]


def both(server, body):
    """The choices of an answer, which are those of its stream."""
    found = whole(server.post(CHATS, body))
    assert alike(assembled(server.events(CHATS, body))) == alike(found)
    return found


@pytest.mark.parametrize("parallel", [True, slow(False)])
def test_required_calls_are_made_with_arguments_of_their_schemas(http_server, parallel):
    body = SAMPLED | {"tool_choice": "required", "n": 3, "parallel_tool_calls": parallel}
    body |= {"logit_bias": {"93": -2}}  # clock takes any object: let it end
    calls = []
    for message, reason in both(http_server, body):
        assert message["content"] is None
        assert reason in ("tool_calls", "length")
        if reason == "tool_calls":
            calls += message["tool_calls"]
        assert parallel or len(message["tool_calls"]) == 1
    assert calls
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert call["type"] == "function"
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] in ("weather", "clock")
        jsonschema.validate(arguments, PLACE if call["function"]["name"] == "weather" else {"type": "object"})


def test_named_tool_is_called(http_server):
    ((message, reason),) = both(http_server, SAMPLED | {"tool_choice": NAMED})
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], reason, message["content"]) == ("weather", "tool_calls", None)
    jsonschema.validate(json.loads(call["function"]["arguments"]), PLACE)
    ((message, reason),) = both(http_server, SAMPLED | {"tool_choice": NAMED, "max_tokens": 3})
    assert (len(message["tool_calls"]), reason) == (1, "length")


WRITTEN = {
    "hermes": (f"so <tool_call>\n{CALL}\n</tool_call>", "so "),
    "llama3_json": (CALL, None),
    "mistral": (f"[TOOL_CALLS][{CALL}]", None),
}


@pytest.mark.parametrize("parser", often(WRITTEN, ("hermes", "mistral")))
def test_calls_are_read_from_what_the_model_writes(told, parser):
    text, content = WRITTEN[parser]
    server = told(enable_auto_tool_choice=True, tool_call_parser=parser)
    body = SAMPLED | {"structured_outputs": {"choice": [text]}, "logprobs": True, "return_token_ids": True}
    ((message, reason),) = both(server, body)
    (call,) = message["tool_calls"]
    assert (message["content"], reason) == (content, "tool_calls")
    assert call["function"] == {"name": "weather", "arguments": '{"place": "here"}'}
    assert (len(call["id"]) == 9) == (parser == "mistral")
    (choice,) = server.post(CHATS, body)["choices"]
    streamed = [choice for event in server.events(CHATS, body) for choice in event["choices"]]
    tokens = [token for choice in streamed for token in choice.get("token_ids", [])]
    assert tokens == choice["token_ids"]
    assert [c for s in streamed if s["logprobs"] for c in s["logprobs"]["content"]] == choice["logprobs"]["content"]


def test_model_that_calls_nothing_answers(told, http_server):
    plain = whole(http_server.post(CHATS, CHAT))
    assert whole(told(**AUTO).post(CHATS, CHAT | {"tools": TOOLS})) == plain
    body = SAMPLED | {"structured_outputs": {"choice": [f"<tool_call>{CALL}"]}, "tool_choice": "none"}
    assert both(http_server, body)[0][0]["content"] == f"<tool_call>{CALL}"


def test_reasoning_is_told_apart_from_the_answer(told):
    text = "<think>\nhm</think>\n\nyes"
    server = told(reasoning_parser="qwen3")
    body = SAMPLED | {"tools": [], "structured_outputs": {"choice": [text]}}
    ((message, reason),) = both(server, body)
    assert (message["reasoning"], message["content"], reason) == ("\nhm", "\n\nyes", "stop")
    assert message["reasoning_content"] == message["reasoning"]
    ((message, _),) = both(server, body | {"include_reasoning": False})
    assert "reasoning" not in message
    ((message, _),) = both(server, body | {"structured_outputs": {"choice": ["well"]}})
    assert (message["content"], "reasoning" in message) == ("well", False)
    ((message, _),) = both(told(reasoning_parser="deepseek_r1"), CHAT)
    assert (message["content"], bool(message["reasoning"])) == (None, True)


def test_form_begins_behind_the_reasoning(told, monkeypatch):
    """A checkpoint that has a token for the end of reasoning: here any that the model likes to write."""
    server = told(reasoning_parser="deepseek_r1")
    tokenizer = server.service.llm.tokenizer
    encode, (stand_in,) = tokenizer.encode, tokenizer.encode("\n", add_special_tokens=False)
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, **more: [stand_in] if text == "</think>" else encode(text, **more)
    )
    body = SAMPLED | {"tools": [], "structured_outputs": {"regex": "[0-9]{4}"}, "max_tokens": 200}
    ((message, reason),) = both(server, body)
    thoughts, _, answer = message["reasoning"].rpartition("\n")
    assert (reason, len(answer), answer.isdecimal()) == ("stop", 4, True)
    assert thoughts.strip()


def test_conversations_with_calls_go_into_the_template(told):
    template = (
        "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning }}"
        "{{ m.thinking }}{% for c in m.tool_calls %}{{ c.function.name }}:{{ c.function.arguments.place }}{% endfor %}"
        "{{ m.tool_call_id }}]{% endfor %}"
    )
    server = told(chat_template=template, **AUTO)
    function = {"name": "weather", "arguments": '{"place": "here"}'}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "reasoning_content": "hm",
         "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "yes"}]},
        {"role": "user", "content": None},
    ]  # fmt: skip
    body = CHAT | {"messages": messages, "tools": TOOLS[1:], "max_tokens": 1, "return_token_ids": True}
    rendered = server.post("/detokenize", {"tokens": server.post(CHATS, body)["prompt_token_ids"]})["prompt"]
    tools, _, rest = rendered.partition("[user")
    assert json.loads(tools) == TOOLS[1:]
    assert rest == "|Rain?|][assistant||hmhmweather:here][tool|yes|1][user||]"
    body = {"messages": messages, "tools": TOOLS[1:]}
    assert server.post("/detokenize", server.post("/tokenize", body) | {})["prompt"] == rendered


def in_channel(header):
    """A template that leaves off within a message, or before its header."""
    return "<|start|>user<|message|>{{ messages[-1].content }}<|end|><|start|>assistant" + header


def test_channels_are_told_apart(told):
    body = CHAT | {"return_token_ids": True}
    server = told(reasoning_parser="openai_gptoss", chat_template=in_channel("<|channel|>analysis<|message|>"))
    ((message, _),) = both(server, body)
    assert (message["content"], bool(message["reasoning"])) == (None, True)
    server = told(tool_call_parser="openai", chat_template=in_channel("<|channel|>final<|message|>"))
    ((message, _),) = both(server, body)
    assert message["content"]
    assert "reasoning" not in message


def test_channels_end_where_a_call_or_an_answer_does(told, monkeypatch):
    """A checkpoint whose tokens for that no file names: here one that the model likes to write."""
    server = told(tool_call_parser="openai", chat_template=in_channel("<|channel|>final<|message|>"))
    tokenizer = server.service.llm.tokenizer
    encode, (stand_in,) = tokenizer.encode, tokenizer.encode("\n", add_special_tokens=False)
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, **more: [stand_in] if text == "<|call|>" else encode(text, **more)
    )
    body = CHAT | {"max_tokens": 200, "ignore_eos": False}
    (choice,) = server.post(CHATS, body)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stand_in)
    assert server.post(CHATS, body | {"ignore_eos": True})["choices"][0]["finish_reason"] == "length"


def test_form_is_that_of_the_final_channel(told):
    template = in_channel("")
    server = told(reasoning_parser="openai_gptoss", tool_call_parser="openai", chat_template=template)
    body = SAMPLED | {"return_token_ids": True, "tool_choice": "none", "structured_outputs": {"regex": "[0-9]{4}"}}
    ((message, reason),) = both(server, body)
    assert (len(message["content"]), message["content"].isdecimal(), reason) == (4, True, "stop")
    prompt = server.post("/detokenize", {"tokens": server.post(CHATS, body)["prompt_token_ids"]})["prompt"]
    assert prompt.endswith("<|end|><|start|>assistant<|channel|>final<|message|>")
    ((message, reason),) = both(server, SAMPLED | {"tool_choice": NAMED})
    assert (message["tool_calls"][0]["function"]["name"], reason) == ("weather", "tool_calls")


def test_effort_goes_into_templates_that_know_it(told):
    for template, expected in (("{{ reasoning_effort }}!", "low!"), ("{{ messages[0].role }}", "user")):
        server = told(chat_template=template)
        tokens = server.post("/tokenize", {"messages": CHAT["messages"], "reasoning_effort": "low"})
        assert server.post("/detokenize", {"tokens": tokens["tokens"]})["prompt"] == expected


def broken_call(**function):
    return {"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"reasoning_effort": 3}, "`reasoning_effort` must be a text. Got 3"),
        ({"tools": TOOLS}, "needs a server with `--enable-auto-tool-choice`"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "needs a server with `--enable-auto-tool-choice`"),
        ({"tools": [{"type": "function"}]}, "Each of `tools` must be"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "Each of `tools` must be"),
        ({"tools": [5]}, "Each of `tools` must be"),
        ({"tools": {}}, "`tools` must be a list"),
        ({"tools": [{"function": {"name": "a", "parameters": [1]}}], "tool_choice": "none"}, "must be a JSON schema"),
        ({"tool_choice": "required"}, '`tool_choice` "required" needs `tools`'),
        ({"tools": TOOLS, "tool_choice": "must"}, '`tool_choice` must be "none"'),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "weather, clock"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "must name a function"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": 1}, "`parallel_tool_calls` must be true"),
        (
            {"tools": [{"function": {"name": "a", "parameters": {"type": "wat"}}}], "tool_choice": "required"},
            "cannot be served: Invalid type: wat",
        ),
        (
            {"tools": [TOOLS[0], {"function": {"name": "a", "parameters": {"$defs": {"place": {}}}}}],
             "tool_choice": "required"},
            "Tools must not define different schemas of one name. Got two of 'place'",
        ),
        (
            {"tools": [{"function": {"name": "a", "parameters": {"definitions": None}}}], "tool_choice": "required"},
            "`definitions` of a tool's `parameters` must be an object. Got None",
        ),
        (broken_call(name="a", arguments="{"), "`arguments` of a call must be a JSON object. Got '{'"),
        (broken_call(name="a", arguments="[1]"), "`arguments` of a call must be a JSON object"),
        (broken_call(arguments="{}"), "must have a `function` with a `name`"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "`tool_calls` of a message must be a list"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(http_server, body, sentence):
    status, _, content = http_server.call("POST", CHATS, CHAT | body)
    assert (status, sentence in content["error"]["message"]) == (400, True), content


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (
            ("nobody", None, False),
            "`--tool-call-parser` must be one of hermes, llama3_json, mistral, openai. Got 'nobody'",
        ),
        (
            (None, "nobody", False),
            "`--reasoning-parser` must be one of deepseek_r1, qwen3, openai_gptoss. Got 'nobody'",
        ),
        (("openai", "qwen3", False), "`--reasoning-parser` must be openai_gptoss or none beside .* Got 'qwen3'"),
        (("hermes", "openai_gptoss", False), "`--tool-call-parser` must be openai or none beside .* Got 'hermes'"),
        ((None, None, True), "`--enable-auto-tool-choice` needs `--tool-call-parser`"),
    ],
)
def test_parsers_that_are_not_there_are_refused(names, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_parsers(*names)
    check_parsers("mistral", "qwen3", True)
    check_parsers("openai", "openai_gptoss", True)
