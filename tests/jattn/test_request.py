"""What a caller may ask for, and what the host knows of it."""

import re

import numpy as np
import pytest

from jattn.serving.request import Request, SamplingParams, token_ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 2.7),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", float("nan")),
        ("max_tokens", True),
        ("seed", -2),
        ("truncate_prompt_tokens", 0),
        ("bad_words", ("a", "")),
        ("detokenize", 1),
        ("structured_outputs", {"json": {}}),  # no mapping: the class
        ("output_kind", 2),
        ("spaces_between_special_tokens", False),
        ("seed", 2**32),
        ("seed", 2.7),
        ("temperature", 1e39),
        ("temperature", True),
        ("n", 0),
        ("n", 1.5),
        ("min_tokens", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("logprobs", -2),
        ("logprobs", 1.5),
        ("prompt_logprobs", True),
    ],
)
def test_sampling_params_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"`{field}` must be .* Got {re.escape(str(value))}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("stop_token_ids", "got"),
    [((5.5,), "5.5"), ((2**40,), str(2**40)), ((-1,), "-1"), (("x",), "'x'"), (5, "5"), (b"ab", "b'ab'")],
)
def test_stop_token_ids_that_are_none_are_refused(stop_token_ids, got):
    with pytest.raises(ValueError, match=rf"`stop_token_ids` must be whole numbers .* Got {got}\.$"):
        SamplingParams(stop_token_ids=stop_token_ids)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
def test_numbers_that_are_none_are_refused(field):
    for value in ("0.5", None, [0.5]):
        with pytest.raises(ValueError, match=rf"`{field}` must be .* Got "):
            SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("stop", "expected"), [("a", ("a",)), (["a", "bc"], ("a", "bc")), (("x",), ("x",)), (None, ()), ((), ())]
)
def test_stop_may_be_one_text_or_several(stop, expected):
    assert SamplingParams(stop=stop).stop == expected


@pytest.mark.parametrize(
    ("stop", "got"), [("", "''"), (["a", ""], r"\['a', ''\]"), (5, "5"), ([b"a"], r"\[b'a'\]"), (b"a", "b'a'")]
)
def test_stop_that_is_no_text_is_refused(stop, got):
    with pytest.raises(ValueError, match=rf"`stop` must be a text or several, none of them empty. .*{got}"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize(
    ("logit_bias", "sentence"),
    [
        ({1: float("inf")}, "`logit_bias` must map token ids to finite numbers. Got {1: inf}"),
        ({1: 1e39}, "`logit_bias` must map token ids to finite numbers"),
        ({1: "x"}, "`logit_bias` must map token ids to finite numbers"),
        ([1, 2], r"`logit_bias` must map token ids to finite numbers. Got \[1, 2\]"),
        ({-1: 2.0}, "The token ids of `logit_bias` must be whole numbers .* Got -1"),
        ({"a": 2.0}, "The token ids of `logit_bias` must be whole numbers .* Got 'a'"),
    ],
)
def test_logit_bias_that_is_none_is_refused(logit_bias, sentence):
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(logit_bias=logit_bias)


def test_logit_bias_is_the_requests_own():
    given = {np.int64(3): np.float32(1.5)}
    params = SamplingParams(logit_bias=given)
    given[4] = 1.0
    assert params.logit_bias == {3: 1.5}
    assert {type(x) for pair in params.logit_bias.items() for x in pair} == {int, float}
    assert hash(params) == hash(SamplingParams(logit_bias={5: 1.0}))


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            {"min_tokens": 5, "max_tokens": 4},
            "`min_tokens` must be at most `max_tokens`. Got min_tokens=5, max_tokens=4",
        ),
        ({"stop": "a", "detokenize": False}, "`stop` needs `detokenize`"),
        ({"allowed_token_ids": ()}, "`allowed_token_ids` must be None"),
        ({"allowed_token_ids": (1.5,)}, "`allowed_token_ids` must be whole numbers"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(asked, sentence):
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**asked)


@pytest.mark.parametrize(
    ("asked", "rules", "logprobs"),
    [
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "stop": "a", "n": 2}, False, False),
        ({"repetition_penalty": 1.1}, True, False),
        ({"presence_penalty": 0.1}, True, False),
        ({"frequency_penalty": -0.1}, True, False),
        ({"logit_bias": {1: 0.5}}, True, False),
        ({"logit_bias": {}}, False, False),
        ({"min_tokens": 1}, True, False),
        ({"logprobs": 0}, False, True),
        ({"prompt_logprobs": 0}, False, True),
    ],
)
def test_params_know_what_they_need(asked, rules, logprobs):
    params = SamplingParams(**asked)
    assert (params.has_logit_rules, params.has_logprobs) == (rules, logprobs)


def test_values_that_vllm_takes_for_off_or_all_are_taken():
    params = SamplingParams(n=2, temperature=0, top_k=-1, max_tokens=None, seed=-1, logprobs=-1, min_tokens=500)
    assert (params.n, params.top_k, params.max_tokens, params.seed, params.logprobs) == (2, 0, None, None, -1)
    assert SamplingParams(bad_words="a").bad_words == ("a",)


def test_sequences_of_n_have_seeds_of_their_own():
    params = SamplingParams(n=3, seed=2**32 - 2, prompt_logprobs=1, top_k=5)
    sequences = [params.of_sequence(i) for i in range(3)]
    assert [sequence.seed for sequence in sequences] == [2**32 - 2, 2**32 - 1, 0]
    assert [sequence.prompt_logprobs for sequence in sequences] == [1, None, None]
    assert {(sequence.n, sequence.top_k) for sequence in sequences} == {(1, 5)}
    assert SamplingParams(n=2).of_sequence(1).seed is None


def test_integers_of_any_type_become_ints():
    params = SamplingParams(
        max_tokens=np.int64(3), top_k=np.int32(4), seed=np.uint32(5), stop_token_ids=np.array([6, 7])
    )
    assert params == SamplingParams(max_tokens=3, top_k=4, seed=5, stop_token_ids=(6, 7))
    assert {type(params.max_tokens), type(params.top_k), type(params.seed), type(params.stop_token_ids[0])} == {int}
    assert token_ids([np.int64(8)], "Ids") == (8,)


def test_num_tokens_counts_the_prompt_and_what_was_generated():
    request = Request(number=0, prompt=[1, 2], params=SamplingParams(), limit=9, stop_ids=frozenset(), generated=[3])
    assert request.num_tokens == len(request.tokens) == 3


def test_values_that_other_engines_take_for_off_are_taken():
    asked = {"top_k": -1, "stop_token_ids": None, "logit_bias": {"7": 1.5}}
    params = SamplingParams(**asked)
    assert (params.top_k, params.stop_token_ids, params.logit_bias) == (0, (), {7: 1.5})


@pytest.mark.parametrize("name", ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"])
def test_flags_that_are_no_booleans_are_refused(name):
    asked = {name: "no"}
    with pytest.raises(ValueError, match=f"`{name}` must be True or False. Got 'no'"):
        SamplingParams(**asked)


def test_more_sequences_than_anyone_serves_are_refused():
    with pytest.raises(ValueError, match="`n` must be a whole number of at least 1 and at most 16384"):
        SamplingParams(n=10**9)
