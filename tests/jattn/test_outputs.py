"""The deltas of a sequence: its text up to a stop string or token, in whole characters, and its log-probabilities."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.serving.frontend.outputs import Delta, SequenceReader, gather
from jattn.serving.request import Request, RequestStatus, SamplingParams
from jattn.serving.steps.logprobs import Logprob
from tests.jattn.test_stop_strings import ending
from tests.jattn.test_text import byte_level, saved, unigram_byte_fallback


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Byte tokens with few merges: a character beyond ASCII takes several tokens. 0 and 1 are special."""
    return saved(byte_level(), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """Tokens that are single bytes, for the newline too."""
    return saved(unigram_byte_fallback(), tmp_path_factory.mktemp("checkpoint"))


def new_request(**asked):
    params = SamplingParams(max_tokens=1000, **asked)
    stop_ids = frozenset({1, *params.stop_token_ids})
    return Request(number=0, prompt=[5, 6, 7], params=params, limit=1000, stop_ids=stop_ids)


def finish(request, reason):
    request.finish_reason, request.status = reason, RequestStatus.FINISHED


def read_all(tokenizer, request, tokens, cuts=(), reason="length"):
    """The deltas of `tokens`, read whenever so many have come as `cuts` says, and at the end."""
    reader = SequenceReader(request, tokenizer, index=3, output_index=2)
    deltas = []
    for count, token in enumerate(tokens):
        if count in cuts:
            assert reader.has_news == (count > 0)
            deltas += reader.read()
            assert not reader.has_news or reader.finished
        if reader.finished:
            break
        request.generated.append(token)
    finish(request, reason)
    return deltas + reader.read()


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def token_ids_of(deltas):
    return [token for delta in deltas for token in delta.token_ids]


texts = st.text("ab é🙂\n", max_size=30)
stop_strings = st.lists(st.text("ab é🙂\n", min_size=1, max_size=4), max_size=3).map(tuple)


@given(text=texts, stop=stop_strings, include=st.booleans(), cuts=st.sets(st.integers(1, 60)))
def test_text_ends_at_a_stop_string_over_any_tokens(tokenizer, text, stop, include, cuts):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    request = new_request(stop=stop, include_stop_str_in_output=include)
    deltas = read_all(tokenizer, request, tokens, cuts)
    start, end, found = ending(text, stop)
    assert text_of(deltas) == text[: end if include else start]
    assert not any("\ufffd" in delta.text for delta in deltas)
    reasons = [delta.finish_reason for delta in deltas]
    assert reasons == [None] * (len(deltas) - 1) + ["length" if found is None else "stop"]
    assert deltas[-1].stop_reason == found
    read = token_ids_of(deltas)
    assert read == tokens[: len(read)]
    if found is not None:  # the tokens end with the one that makes the string complete
        whole, before = tokenizer.decode(read), tokenizer.decode(read[:-1]).rstrip("\ufffd")
        assert whole.startswith(text[:end])
        assert len(before) < end
    else:
        assert read == tokens


@given(text=texts, stop=stop_strings, include=st.booleans(), cuts=st.sets(st.integers(1, 60)))
def test_text_ends_at_the_byte_token_that_completes_a_stop_string(byte_tokenizer, text, stop, include, cuts):
    tokens = byte_tokenizer.encode(text)
    request = new_request(stop=stop, include_stop_str_in_output=include)
    deltas = read_all(byte_tokenizer, request, tokens, cuts)
    start, end, found = ending(text, stop)
    assert text_of(deltas) == text[: end if include else start]
    assert deltas[-1].stop_reason == found
    assert token_ids_of(deltas) == byte_tokenizer.encode(text[:end])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, "ab"),
        ({"include_stop_str_in_output": True}, "ab!"),
        ({"skip_special_tokens": False}, "ab"),
        ({"stop": "b"}, "a"),
    ],
)
def test_stop_token_is_no_text_unless_included(tokenizer, asked, expected):
    (stop,) = tokenizer.encode("!", add_special_tokens=False)
    tokens = [*tokenizer.encode("ab", add_special_tokens=False), stop]
    deltas = read_all(tokenizer, new_request(stop_token_ids=(stop,), **asked), tokens, reason="stop")
    assert text_of(deltas) == expected
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason == ("b" if "stop" in asked else stop)
    assert token_ids_of(deltas) == (tokens[:2] if "stop" in asked else tokens)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "a<|end|>b"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<|end|>b<|end|>"),
        ({"skip_special_tokens": False, "stop": "<|end|>"}, "a"),
        ({"stop": "<|end|>"}, "ab"),
    ],
)
def test_special_tokens_are_text_if_asked_for(tokenizer, asked, expected):
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    deltas = read_all(tokenizer, new_request(**asked), [a, 1, b, 1], reason="stop")
    assert text_of(deltas) == expected


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, ""), (1, "xa"), (2, "xa"), (3, "xaxab"), (4, "xaxab")])
def test_stop_string_does_not_end_a_text_before_min_tokens(tokenizer, min_tokens, expected):
    tokens = tokenizer.encode("xaxab", add_special_tokens=False)
    assert len(tokens) == 5
    deltas = read_all(tokenizer, new_request(stop="x", min_tokens=min_tokens), tokens)
    assert text_of(deltas) == expected


def test_text_that_ends_where_its_grammar_does_has_all_of_its_tokens(tokenizer):
    tokens = tokenizer.encode("ab", add_special_tokens=False)
    deltas = read_all(tokenizer, new_request(), tokens, reason="stop")
    assert (text_of(deltas), deltas[-1].stop_reason) == ("ab", None)


def test_sequence_that_ends_without_a_token_gives_what_was_held(tokenizer):
    tokens = tokenizer.encode("ab", add_special_tokens=False)
    request = new_request(stop="bc")
    reader = SequenceReader(request, tokenizer, index=0, output_index=0)
    request.generated += tokens
    assert text_of(reader.read()) == "a"
    finish(request, "error")
    (last,) = reader.read()
    assert (last.text, last.token_ids, last.finish_reason) == ("b", (), "error")
    assert last.error == request.error
    assert reader.finished
    assert reader.read() == []


def test_stop_string_in_what_was_held_hides_no_error(tokenizer):
    tokens = tokenizer.encode("ab", add_special_tokens=False)
    *_, last = read_all(tokenizer, new_request(stop="b"), tokens, reason="error")
    assert last.finish_reason == "error"
    assert last.error


def test_logprobs_come_with_their_tokens_and_texts(tokenizer):
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    request = new_request(logprobs=1, prompt_logprobs=0, stop="b")
    request.prompt_logprobs.update({1: {6: Logprob(-3.0, 4)}, 2: {a: Logprob(-1.0, 1)}})
    request.logprobs += [{a: Logprob(-0.5, 1)}, {b: Logprob(-2.5, 2), a: Logprob(-0.25, 1)}, {a: Logprob(-9.0, 9)}]
    first, second = read_all(tokenizer, request, [a, b, a])
    assert first.prompt_logprobs == (
        None,
        {6: Logprob(-3.0, 4, tokenizer.decode([6]))},
        {a: Logprob(-1.0, 1, "a")},
    )
    assert second.prompt_logprobs is None
    assert first.logprobs == ({a: Logprob(-0.5, 1, "a")},)
    assert second.logprobs == ({b: Logprob(-2.5, 2, "b"), a: Logprob(-0.25, 1, "a")},)
    (output,) = gather([[5, 6, 7]], [dataclasses.replace(d, index=0, output_index=0) for d in (first, second)])
    assert output.prompt_logprobs == first.prompt_logprobs
    assert output.outputs[0].logprobs == first.logprobs + second.logprobs
    assert output.outputs[0].cumulative_logprob == -3.0


def test_prompt_logprobs_that_are_not_all_known_are_none(tokenizer):
    request = new_request(prompt_logprobs=1)
    request.prompt_logprobs[1] = {6: Logprob(-3.0, 4)}
    (last,) = read_all(tokenizer, request, [], reason="abort")
    assert (last.finish_reason, last.prompt_logprobs) == ("abort", None)


def test_gather_sorts_interleaved_deltas():
    deltas = [
        Delta(1, "a", (1,), None),
        Delta(0, "b", (2,), "stop", output_index=1, stop_reason="x"),
        Delta(0, "c", (3,), "length"),
        Delta(1, "d", (4,), "error", "A sentence."),
    ]
    first, second = gather([[7], [8, 9]], deltas)
    assert first.prompt_token_ids == (7,)
    assert [(o.index, o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in first.outputs] == [
        (0, "c", (3,), "length", None),
        (1, "b", (2,), "stop", "x"),
    ]
    assert (first.text, first.token_ids, first.finish_reason) == ("c", (3,), "length")
    assert (second.text, second.token_ids, second.error) == ("ad", (1, 4), "A sentence.")
    assert second.outputs[0].cumulative_logprob is None


def test_without_detokenizing_there_are_tokens_and_no_text(tokenizer):
    request = new_request(detokenize=False, logprobs=0)
    request.logprobs = [{token: Logprob(-1.0, 1)} for token in (40, 41)]
    deltas = read_all(tokenizer, request, [40, 41])
    assert [delta.token_ids for delta in deltas if delta.token_ids] == [(40,), (41,)]
    assert {delta.text for delta in deltas} == {""}
    assert deltas[0].logprobs == ({40: Logprob(-1.0, 1)},)
