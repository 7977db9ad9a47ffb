"""Parsers of calls and reasoning: known texts, and the same events for any pieces of any text."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jattn.server.tools.events import CallArguments, CallName, Content, Reasoning, merged
from jattn.server.tools.harmony import HarmonyParser, begun_in
from jattn.server.tools.hermes import HermesParser
from jattn.server.tools.llama3_json import Llama3JsonParser
from jattn.server.tools.message import Message
from jattn.server.tools.mistral import MistralParser
from jattn.server.tools.parser import ArrayParser, NamedParser, PlainParser
from jattn.server.tools.think import ThinkParser, begins_in

PARSERS = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "harmony": lambda: HarmonyParser("<|start|>assistant"),
    "harmony_text": lambda: HarmonyParser("<|start|>assistant", has_calls=False),
    "array": ArrayParser,
    "named": lambda: NamedParser("f"),
    "plain": PlainParser,
    "think": lambda: ThinkParser(HermesParser(), "tag"),
    "think_always": lambda: ThinkParser(PlainParser(), "reasoning"),
    "answer": lambda: ThinkParser(MistralParser(), "answer"),
}
F = '{"name": "f", "arguments": {"a": [1, "}]{\\"<"]}}'
F_ARGUMENTS = '{"a": [1, "}]{\\"<"]}'
G = '{"parameters": {}, "name": "g.2"}'
CALLS = [CallName(0, "f"), CallArguments(0, F_ARGUMENTS), CallName(1, "g.2"), CallArguments(1, "{}")]

THOUGHT, OPENED = "<|channel|>analysis<|message|>hm<|end|>", "<|channel|>final<|message|>"
FINAL = f"<|start|>assistant{OPENED}"
TO, JSON = "<|start|>assistant<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"
CALL_F, CALL_G = f"{TO}f{JSON}{F_ARGUMENTS}", f"{TO}g.2{JSON}"
TWICE = f"{THOUGHT}<|start|>assistant{THOUGHT}{FINAL}a<|end|>\n{FINAL}b"


def events_of(parser, pieces):
    found = [event for piece in pieces for event in parser.push(piece)]
    return merged([*found, *parser.finish()])


def call(name, arguments):
    return [CallName(0, name), CallArguments(0, arguments)]


KNOWN = {
    "no_call": ("hermes", "a < b\n", [Content("a < b\n")]),
    "blank": ("hermes", " \n", [Content(" \n")]),
    "one": ("hermes", f"<tool_call>\n{F}\n</tool_call>", CALLS[:2]),
    "two": ("hermes", f"\n<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>\n", CALLS),
    "around": ("hermes", f" a\n<tool_call>{F}</tool_call>\nb", [Content(" a\n"), *CALLS[:2], Content("\nb")]),
    "unclosed": ("hermes", f"<tool_call>{F}", CALLS[:2]),
    "next": ("hermes", f"<tool_call>{F}<tool_call>{G}", CALLS),
    "cut_arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', call("f", '{"a": [1')),
    "cut_name": ("hermes", '<tool_call>{"name": "f', [Content('<tool_call>{"name": "f')]),
    "cut_tag": ("hermes", "a<tool_ca", [Content("a<tool_ca")]),
    "no_json": ("hermes", "<tool_call>f(1)</tool_call>", [Content("<tool_call>f(1)</tool_call>")]),
    "no_name": ("hermes", '<tool_call>{"a": 1}</tool_call>', [Content('<tool_call>{"a": 1}</tool_call>')]),
    "wrong_name": ("hermes", '<tool_call>{"name": 5}x', [Content('<tool_call>{"name": 5}x')]),
    "no_arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', call("f", "{}")),
    "more_keys": ("hermes", '<tool_call>{"id": 7, "name" : "f" , "arguments":null}', call("f", "null")),
    "broken": ("hermes", '<tool_call>{"name": "f", "arguments": 1 !}</tool_call>x', [*call("f", "1"), Content("x")]),
    "escaped": ("hermes", '<tool_call>{"name": "\\u0066", "arguments": "\\\\"}', call("f", '"\\\\"')),
    "llama": ("llama3_json", F, CALLS[:2]),
    "llama_two": ("llama3_json", f"\n{F}; {G}", CALLS),
    "llama_tag": ("llama3_json", f"<|python_tag|>{F};{G}", CALLS),
    "llama_behind": ("llama3_json", f"well<|python_tag|>{F}", [Content("well"), *CALLS[:2]]),
    "llama_text": ("llama3_json", f"x {F}", [Content(f"x {F}")]),
    "llama_json": ("llama3_json", '{"a": {"b": 1}}', [Content('{"a": {"b": 1}}')]),
    "llama_after": ("llama3_json", f"{F} so", [*CALLS[:2], Content(" so")]),
    "mistral": ("mistral", f"[TOOL_CALLS][{F}, {G}]", CALLS),
    "mistral_space": ("mistral", f"a[TOOL_CALLS] [ {F} ]\n", [Content("a"), *CALLS[:2]]),
    "mistral_names": ("mistral", f"[TOOL_CALLS]f{F_ARGUMENTS}[TOOL_CALLS]g.2{{}}", CALLS),
    "mistral_args": ("mistral", f"[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{F_ARGUMENTS}[TOOL_CALLS]g.2[ARGS]{{}}", CALLS),
    "mistral_none": ("mistral", "[TOOL_CALLS]what is it {", [Content("[TOOL_CALLS]what is it {")]),
    "mistral_cut": ("mistral", "[TOOL_CALLS]f[ARG", [Content("[TOOL_CALLS]f[ARG")]),
    "mistral_empty": ("mistral", "[TOOL_CALLS] []x", [Content("[TOOL_CALLS] []x")]),
    "mistral_long": ("mistral", "[TOOL_CALLS]" + "f" * 300, [Content("[TOOL_CALLS]" + "f" * 300)]),
    "array": ("array", f"[{F} ,{G}]", CALLS),
    "array_cut": ("array", f"[{F}, ", CALLS[:2]),
    "array_cut_in_a_call": ("array", f'[{F}, {{"name": "', CALLS[:2]),
    "array_cut_in_the_first": ("array", '[{"name": "', [Content('[{"name": "')]),
    "array_none": ("array", " [ ", [Content(" [ ")]),
    "array_text": ("array", "no", [Content("no")]),
    "named": ("named", '{"a": 1', call("f", '{"a": 1')),
    "named_nothing": ("named", "", []),
    "think": ("think", f"\n<think>a</thin</think>b<tool_call>{F}", [Reasoning("a</thin"), Content("b"), *CALLS[:2]]),
    "think_not": ("think", "<thin ice</think>", [Content("<thin ice</think>")]),
    "think_cut": ("think", "<think>a</th", [Reasoning("a</th")]),
    "think_begin": ("think", " <thi", [Content(" <thi")]),
    "think_always": ("think_always", "a<think></think> b", [Reasoning("a<think>"), Content(" b")]),
    "think_told": ("think_always", "<think>\na</think>", [Reasoning("\na")]),
    "think_always_cut": ("think_always", "<thi", [Reasoning("<thi")]),
    "harmony": ("harmony", f"{THOUGHT}{FINAL}yes<|return|>", [Reasoning("hm"), Content("yes")]),
    "harmony_cut": ("harmony", "<|channel|>analysis<|message|>hm<|en", [Reasoning("hm<|en")]),
    "harmony_cut_header": ("harmony", f"{THOUGHT}<|start|>assistant<|chan", [Reasoning("hm")]),
    "harmony_call": ("harmony", f"{THOUGHT}{CALL_F}<|call|>", [Reasoning("hm"), *CALLS[:2]]),
    "harmony_role": ("harmony", f" to=functions.f<|channel|>commentary json<|message|>{F_ARGUMENTS}", CALLS[:2]),
    "harmony_two": ("harmony", f"{CALL_F}<|call|>{CALL_G}<|call|>", CALLS),
    "harmony_preamble": ("harmony", f"<|channel|>commentary<|message|>so{CALL_F}", [Content("so"), *CALLS[:2]]),
    "harmony_lines": ("harmony", TWICE, [Reasoning("hm\nhm"), Content("a\nb")]),
    "harmony_builtin": ("harmony", "<|channel|>analysis to=python code<|message|>1+1<|call|>", [Reasoning("1+1")]),
    "harmony_no_end": ("harmony", f"<|channel|>analysis<|message|>hm{FINAL}yes", [Reasoning("hm"), Content("yes")]),
    "harmony_plain": ("harmony", " so <b> it", [Content(" so <b> it")]),
    "harmony_long": ("harmony", "so " * 200, [Content("so " * 200)]),
    "harmony_long_tag": ("harmony", f"{'a' * 230}<|channel|>analysis", [Content("analysis")]),
    "harmony_no_call": ("harmony_text", f"{CALL_F}<|call|>", [Content(F_ARGUMENTS)]),
    "answer": ("answer", "<think>a</think>", [Content("<think>a</think>")]),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_known_text_gives_its_events_whole_and_by_character(name):
    kind, text, expected = KNOWN[name]
    assert events_of(PARSERS[kind](), [text]) == expected
    assert events_of(PARSERS[kind](), text) == expected


PIECES = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[CALL_ID]x"),
    *(
        F,
        G,
        F[:-1],
        F[:20],
        '{"name": ',
        '"f"',
        '{"a": 1}',
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        ":",
        '"',
        "\\",
        "<",
        "f",
        "é🙂",
    ),
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
    *("analysis", "commentary to=functions.f", "final", THOUGHT, FINAL, CALL_F, "a" * 100),
    *(" ", "\n", "null", "true", "a b", "1"),
]


@st.composite
def cut_texts(draw):
    """A text made of what calls are made of, and pieces of it."""
    text = "".join(draw(st.lists(st.sampled_from(PIECES), max_size=12)))
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=8))
    edges = [0, *sorted(cuts), len(text)]
    return text, [text[begin:end] for begin, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=40)
@given(cut=cut_texts())
@example(cut=("<tool_call", ["<tool", "_call"]))
def test_events_do_not_depend_on_the_pieces(kind, cut):
    text, pieces = cut
    whole = events_of(PARSERS[kind](), [text])
    assert events_of(PARSERS[kind](), pieces) == whole
    assert events_of(PARSERS[kind](), text) == whole
    calls = [event for event in whole if isinstance(event, CallName)]
    assert [call.index for call in calls] == list(range(len(calls)))
    if not calls and kind not in ("think", "think_always", "answer", "harmony", "harmony_text"):
        assert "".join(event.text for event in whole) == text


def texts_without_marks(most):
    """Texts without what ends a call: a token of its own in a model, and a text that Hypothesis finds in the code."""
    return st.text(max_size=most).filter(lambda text: "<|" not in text)


@settings(max_examples=15)
@given(
    calls=st.lists(
        st.tuples(
            st.from_regex(r"[a-z_.\-]{1,8}", fullmatch=True),
            st.dictionaries(
                texts_without_marks(5),
                st.recursive(st.none() | st.integers() | texts_without_marks(9), st.lists),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_calls_that_a_model_writes_are_read(calls, indent, ascii_only):
    """In each model's way, whatever the arguments."""

    def dumped(value):
        return json.dumps(value, indent=indent, ensure_ascii=ascii_only)

    objects = [dumped({"name": name, "arguments": arguments}) for name, arguments in calls]
    texts = {
        "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects),
        "llama3_json": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
        "array": f"[{', '.join(objects)}]",
        "harmony": "".join(f"{TO}{name}{JSON}{dumped(arguments)}<|call|>" for name, arguments in calls),
    }
    found = {kind: events_of(PARSERS[kind](), [text]) for kind, text in texts.items()}
    found["names"] = events_of(MistralParser(), ["".join(f"[TOOL_CALLS]{name}{dumped(a)}" for name, a in calls)])
    for events in found.values():
        names = [event.name for event in events if isinstance(event, CallName)]
        arguments = [json.loads(event.text) for event in events if isinstance(event, CallArguments)]
        assert list(zip(names, arguments, strict=True)) == calls
        assert not any(isinstance(event, Content) for event in events)


@pytest.mark.parametrize(
    ("prompt", "always", "begins"),
    [
        ("user: <think>?\nassistant:", False, "tag"),
        ("user: ?\nassistant:", True, "reasoning"),
        ("assistant: <think>\n", False, "reasoning"),
        ("assistant: <think>\n\n</think>\n\n", True, "answer"),
        ("<think>a</think>\nassistant:<think>", False, "reasoning"),
    ],
)
def test_prompt_tells_where_reasoning_begins(prompt, always, begins):
    assert begins_in(prompt, always) == begins


@pytest.mark.parametrize(
    ("prompt", "text", "expected", "to_answer"),
    [
        ("<|start|>user<|message|>?<|end|><|start|>assistant", f"{OPENED}a", "a", OPENED),
        (f"<|start|>user<|message|>?<|end|>{FINAL}It", " is", " is", ""),
        (f"{FINAL}<|channel|>commentary to=functions.f<|message|>{{", "}", "}", ""),
        ("<|start|>user<|message|>?<|end|>", f"{FINAL}a", "a", FINAL),
        ("?", f"{FINAL}a", "a", FINAL),
    ],
)
def test_channel_goes_on_where_the_prompt_ends(prompt, text, expected, to_answer):
    assert events_of(HarmonyParser(begun_in(prompt)), text) == [Content(expected)]
    assert HarmonyParser(begun_in(prompt)).to_answer == to_answer


def message_of(text, size, parser=HermesParser, **options):
    message = Message(parser(), **options)
    pieces = ["".join(piece) for piece in itertools.batched(text, size)]
    deltas = [delta for piece in pieces for delta in message.push(piece)]
    return message, [*deltas, *message.push("", is_last=True)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_streamed_message_is_the_whole_one(size):
    message, deltas = message_of(f"so<tool_call>{F}</tool_call><tool_call>{G}</tool_call>", size)
    whole = message.whole
    calls = {}
    for delta in deltas:
        for part in delta.get("tool_calls", []):
            call = calls.setdefault(part["index"], {"function": {"arguments": ""}})
            if "id" in part:
                call |= {"id": part["id"], "type": part["type"]}
                call["function"]["name"] = part["function"]["name"]
            call["function"]["arguments"] += part["function"]["arguments"]
    assert list(calls.values()) == whole["tool_calls"]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["content"] == "so"
    assert len({call["id"] for call in calls.values()}) == 2
    assert [message.finish_reason(reason) for reason in ("stop", "length")] == ["tool_calls", "length"]


def test_message_has_no_more_than_it_may():
    message, deltas = message_of(f"<tool_call>{F}</tool_call><tool_call>{G}", 5, is_parallel=False, short_ids=True)
    (call,) = message.whole["tool_calls"]
    assert (call["function"]["name"], len(call["id"]), message.whole["content"]) == ("f", 9, None)
    assert all(part["index"] == 0 for delta in deltas for part in delta["tool_calls"])
    thinks = PARSERS["think"]
    assert message_of("<think>a</think>b", 3, thinks)[0].whole["reasoning_content"] == "a"
    hidden = message_of("<think>a</think>b", 3, thinks, includes_reasoning=False)
    assert hidden[0].whole == {"role": "assistant", "content": "b", "refusal": None}
    assert message_of("a", 1, PlainParser)[0].finish_reason("stop") == "stop"
    assert dataclasses.replace(Content("a"), text="b") in merged([Content("b"), Content("")])
