"""What may be asked of a text's form, and the sentences for what may not."""

import builtins
import dataclasses
import functools

import pytest

from jattn.serving.sampling_params import SamplingParams
from jattn.serving.structured.compiler import GrammarCompiler
from jattn.serving.structured.params import StructuredOutputsParams
from tests.jattn.harness.tiny import VOCAB
from tests.jattn.harness.tiny_grammars import END, compiler, grammar, text, tokenizer

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}

NESTED = functools.reduce(lambda inner, _: {"items": inner}, range(10**5), {})


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({}, "must have exactly one of json, regex, choice, grammar, json_object. Got none"),
        ({"json_object": False}, "exactly one of .* Got none"),
        ({"json": {}, "regex": "a"}, "exactly one of .* Got json, regex"),
        ({"json": "{"}, "`json` must be a JSON schema"),
        ({"json": [1]}, r"`json` must be a JSON schema: .* Got \[1\]"),
        ({"json": {"a": object()}}, "`json` must be a JSON schema"),
        ({"json": 5}, "`json` must be a JSON schema"),
        ({"json": NESTED}, "`json` must be a JSON schema: .* Got one that is nested too deep"),
        ({"regex": ""}, "`regex` must be a text that is not empty. Got ''"),
        ({"regex": 5}, "`regex` must be a text"),
        ({"grammar": "\ud800"}, "`grammar` must be a text"),
        ({"choice": []}, "`choice` must be texts"),
        ({"choice": "ab"}, "`choice` must be texts"),
        ({"choice": ["a", ""]}, "`choice` must be texts"),
        ({"choice": ["a", 5]}, "`choice` must be texts"),
        ({"json_object": 2}, "`json_object` must be True or False. Got 2"),
        ({"json": {}, "disable_any_whitespace": "no"}, "`disable_any_whitespace` must be True or False. Got 'no'"),
        ({"json": {}, "whitespace_pattern": 5}, "`whitespace_pattern` must be a text"),
        ({"structural_tag": "x"}, "`structural_tag` is not served"),
        ({"json": {}, "disable_additional_properties": True}, "`disable_additional_properties` is not served"),
    ],
)
def test_wrong_values_are_refused(asked, sentence):
    with pytest.raises(ValueError, match=sentence):
        StructuredOutputsParams(**asked)


def test_schemas_that_are_alike_are_equal_and_hashable():
    params = [
        StructuredOutputsParams(json=json)
        for json in (SCHEMA, '{"type": "object",\n "properties": {"\\u00e9": {"type": "integer"}}}')
    ]
    assert params[0] == params[1]
    assert len({SamplingParams(structured_outputs=each) for each in params}) == 1
    assert StructuredOutputsParams(json=True).json == "{}"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"regex": "(["}, "`regex` of `structured_outputs` cannot be served: .*unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": {"type": "wat"}}, "`json` of .* cannot be served: Invalid type: wat"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/foo"}}, "'/foo' does not exist"),
        ({"grammar": "start: nothing"}, '`grammar` of .* unknown name: "nothing"'),
        ({"json": {}, "whitespace_pattern": "("}, "`json` of .* cannot be served"),
        ({"grammar": "start: start"}, "`grammar` of .* cannot be served: NoExtensionBias"),
        ({"grammar": "start: " + "(" * 10**5 + '"a"' + ")" * 10**5}, "too deeply nested"),
        ({"regex": "(" * 10**5 + "a" + ")" * 10**5}, "invalid regex"),
        ({"regex": "|".join(map(str, range(10**5)))}, "too big"),
    ],
)
def test_what_llguidance_refuses_is_told_with_its_reason(asked, sentence):
    with pytest.raises(ValueError, match=sentence) as told:
        grammar(**asked)
    assert "\n" not in str(told.value)
    assert str(told.value).endswith(".")
    assert len(str(told.value)) < 500


def written(made, wanted):
    """How many of the bytes of a text the grammar takes, and whether it may end there."""
    tokens = tokenizer().encode(wanted).ids
    count = made.matcher.try_consume_tokens(tokens)
    return text(tokens[:count]), made.matcher.is_accepting()


@pytest.mark.parametrize(
    ("asked", "wanted", "taken"),
    [
        ({"json": SCHEMA}, '{ "é" :\n5}', '{ "é" :\n5}'),
        ({"json": SCHEMA}, '{\n  "é": 5\n}', '{\n  "é": 5\n}'),
        ({"json": SCHEMA}, '{\n\n"é": 5}', "{\n"),
        ({"json": SCHEMA, "disable_any_whitespace": True}, '{ "é":5}', "{"),
        ({"json": SCHEMA, "whitespace_pattern": " "}, '{ "é" : 5 }', '{ "é" : 5 }'),
        ({"json_object": True}, '{"a": [1, null]}', '{"a": [1, null]}'),
        ({"json_object": True}, "[1]", ""),
        ({"choice": ['a"b\n🙂', "x\\"]}, 'a"b\n🙂', 'a"b\n🙂'),
        ({"choice": ['a"b\n🙂', "x\\"]}, "x\\", "x\\"),
        ({"regex": r"\d{2}|a+"}, "aaab", "aaa"),
        ({"grammar": 'start: "a" x\nx: "b" | "c" x'}, "accb", "accb"),
        ({"grammar": 'root ::= "a" x\nx ::= "b" | "c" x'}, "accb", "accb"),
    ],
)
def test_grammar_takes_what_is_asked_for(asked, wanted, taken):
    found, may_end = written(grammar(**asked), wanted)
    assert found == taken
    assert may_end == (taken == wanted or taken == "aaa")


def test_requests_alike_are_compiled_once(monkeypatch):
    asked = [StructuredOutputsParams(regex=regex) for regex in ("one", "two", "one")]
    made, compiled = GrammarCompiler(lambda: (tokenizer().to_str(), VOCAB), (END,)), []
    compile_one = made._compiled
    monkeypatch.setattr(made, "_compiled", lambda params: compiled.append(params) or compile_one(params))
    grammars = [made.compile(params) for params in asked]
    assert compiled == asked[:2]
    grammars[0].matcher.consume_tokens(tokenizer().encode("one").ids)
    assert written(grammars[2], "one") == ("one", True)
    for i in range(100):
        made.compile(StructuredOutputsParams(regex=f"x{i}"))
    assert len(made._kept) == 64
    made.compile(asked[0])
    assert compiled[-1] == asked[0]


def test_a_missing_llguidance_is_told_in_a_sentence(monkeypatch):
    imports = builtins.__import__

    def without(name, *rest):
        if name == "llguidance":
            raise ImportError("No module named 'llguidance'")
        return imports(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="Structured output needs the package llguidance: install it with `pip"):
        compiler().compile(StructuredOutputsParams(regex="never seen before"))


def test_a_tokenizer_that_llguidance_cannot_read_is_told_in_a_sentence():
    with pytest.raises(ValueError, match=r"needs a tokenizer that llguidance can read\. Got \w"):
        GrammarCompiler(lambda: (tokenizer().to_str(), 5), (END,)).compile(StructuredOutputsParams(regex="a"))


def test_sampling_params_take_the_class_alone():
    with pytest.raises(ValueError, match="`structured_outputs` must be None or a StructuredOutputsParams"):
        SamplingParams(structured_outputs={})
    of_sequence = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), n=2).of_sequence(1)
    assert of_sequence.structured_outputs == StructuredOutputsParams(regex="a")
    assert {field.name for field in dataclasses.fields(StructuredOutputsParams)} >= {"json", "regex", "choice"}
