"""The server as clients find it: openai-python as it is, and bodies that nobody would send."""

import asyncio
import json
from typing import Literal

import numpy as np
import pytest

from jattn.server import sampling_fields
from tests.jattn.harness.http_server import CHAT, GREEDY, MODEL

pytestmark = pytest.mark.slow
MESSAGES = CHAT["messages"]


@pytest.fixture
def openai():
    return pytest.importorskip("openai")


@pytest.fixture
def options(http_server):
    return {"base_url": f"http://127.0.0.1:{http_server.port}/v1", "api_key": "none"}


def test_openai_completes(openai, options):
    with openai.OpenAI(**options) as client:
        asked = {**GREEDY, "model": MODEL, "extra_body": {"ignore_eos": True}}
        del asked["ignore_eos"]
        completion = client.completions.create(**asked, logprobs=2, n=2)
        assert {choice.text for choice in completion.choices} == {completion.choices[0].text}
        assert len(completion.choices[0].logprobs.tokens) == 10
        assert completion.usage.total_tokens == 24
        with client.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
            *chunks, last = stream
        assert "".join(chunk.choices[0].text for chunk in chunks) == completion.choices[0].text
        assert (last.choices, last.usage.completion_tokens) == ([], 10)


def test_openai_chats(openai, options):
    with openai.OpenAI(**options) as client:
        asked = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 10}
        answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, seed=2**40, user="u")
        (choice,) = answer.choices
        assert choice.finish_reason in ("stop", "length")
        assert len(choice.logprobs.content) == answer.usage.completion_tokens
        with client.chat.completions.create(**asked, stream=True) as stream:
            chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
        assert chunks[-1].choices[0].finish_reason == choice.finish_reason
        with client.chat.completions.stream(**asked, stop=[choice.message.content[3:5]]) as stream:
            final = stream.get_final_completion().choices[0]
        assert (final.finish_reason, choice.message.content.startswith(final.message.content)) == ("stop", True)


def test_openai_gets_the_form_that_it_asks_for(openai, options):
    pydantic = pytest.importorskip("pydantic")

    class Answer(pydantic.BaseModel):
        kind: Literal["a", "b"]
        count: int = pydantic.Field(ge=0, le=99)

    with openai.OpenAI(**options) as client:
        asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "seed": 1}
        narrow = {"extra_body": {"structured_outputs": {"disable_any_whitespace": True}}}
        parsed = client.chat.completions.parse(**asked, **narrow, response_format=Answer).choices[0].message.parsed
        assert isinstance(parsed, Answer)
        form = {"extra_body": {"structured_outputs": {"choice": ["one", "two"]}}}
        assert client.chat.completions.create(**asked, **form).choices[0].message.content in ("one", "two")


def test_openai_calls_tools(openai, options):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["a"],
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema | {"additionalProperties": False}}}]
    with openai.OpenAI(**options) as client:
        asked = {"model": MODEL, "messages": MESSAGES, "tools": tools, "max_tokens": 200, "seed": 2}
        asked["parallel_tool_calls"] = False
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            answer = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
            with client.chat.completions.stream(**asked, tool_choice=choice) as stream:
                final = stream.get_final_completion().choices[0]
            for found in (answer, final):
                (call,) = found.message.tool_calls
                assert (call.function.name, found.finish_reason) == ("f", "tool_calls")
                assert set(json.loads(call.function.arguments)) == {"a"}
            assert answer.message.tool_calls[0].function.arguments == final.message.tool_calls[0].function.arguments
            told = {"role": "tool", "tool_call_id": answer.message.tool_calls[0].id, "content": "5"}
            messages = [*MESSAGES, answer.message, told]
            rest = client.chat.completions.create(**asked | {"messages": messages}, tool_choice="none")
            assert rest.choices[0].message.tool_calls is None


def test_openai_chats_many_at_once(openai, options):
    async def run():
        async with openai.AsyncOpenAI(**options) as client:

            async def ask(seed):
                asked = {"model": MODEL, "messages": MESSAGES, "seed": seed, "max_tokens": 20}
                stream = await client.chat.completions.create(**asked, stream=True)
                streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                whole = await client.chat.completions.create(**asked)
                return streamed, whole.choices[0].message.content

            return await asyncio.gather(*map(ask, range(32)))

    texts = asyncio.run(run())
    assert all(streamed == whole for streamed, whole in texts)
    assert len({whole for _, whole in texts}) > 16


def test_openai_tells_what_is_wrong(openai, options):
    with openai.OpenAI(**options, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="The model 'gpt-4' does not exist"):
            client.chat.completions.create(model="gpt-4", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="`temperature` must be finite"):
            client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
        assert [model.id for model in client.models.list()] == [MODEL, "other-name"]
        assert client.models.retrieve(MODEL).id == MODEL


FIELDS = [
    *sampling_fields._SAMPLING,
    *sampling_fields._NOT_SERVED,
    *("best_of", "seed", "prompt", "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"),
    *("stream", "stream_options", "echo", "suffix", "model", "tools", "tool_choice", "request_id", "cache_salt"),
    *("add_special_tokens", "continue_final_message", "add_generation_prompt", "chat_template_kwargs", "tokens"),
    *("return_token_ids", "return_tokens_as_token_ids", "return_token_strs", "unheard_of"),
    *("structured_outputs", "response_format", "parallel_tool_calls", "include_reasoning"),
]
VALUES = [
    *(None, True, False, 0, 1, 2, -1, 7, 128, 2**31, 2**63, -(2**70), 0.0, 0.5, 1.0, 1e-30, 1e300, float("nan")),
    *("", "a", "import os", "\ud800", "\x00", "🙂", "x " * 300, "0", "7"),
    *([], [1], [5, 6, 7], [2048], [-1], [1.5], [[5], [6, 7]], ["a", "b"], [""], [None], [[]], [[[]]], ["a", 5]),
    *({}, {"5": 1.0}, {"-1": 1}, {"a": "b"}, {"include_usage": True}, {"include_usage": 1}, {"type": "text"}),
    *({"regex": "a+"}, {"json": {"type": "x"}}, {"choice": ["a"]}, {"type": "json_object"}, {"grammar": "root ::= x"}),
    *("required", {"type": "function", "function": {"name": "f"}}, [{"type": "function", "function": {"name": "f"}}]),
    *([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],),
    *([{"role": "user", "content": "x"}], [{"role": "user"}], [{"content": "x"}], [{"role": 5, "content": []}]),
]


def test_any_body_is_answered_or_refused(http_server):
    """Whatever it is, never by an error of the server's; and nothing is left of it."""
    random = np.random.default_rng(7)
    statuses = []
    for _ in range(5000):
        path = random.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
        body = {**GREEDY, **CHAT, "max_tokens": 2} if random.random() < 0.8 else {}
        for name in random.choice(FIELDS, random.integers(0, 4)):
            body[str(name)] = VALUES[random.integers(len(VALUES))]
        status, _, content = http_server.call("POST", path, json.dumps(body).encode())
        assert 200 <= status < 300 or 400 <= status < 500, (path, body, content)
        if status >= 400:
            assert content["error"]["message"].endswith((".", "?")), (body, content)
        statuses.append(status)
    assert min(statuses.count(200), statuses.count(400), statuses.count(404)) > 50
    assert http_server.service.thread.death is None
