"""Grammars in the serving loop: the host recounts each request's tokens from the model's logits and a matcher."""

import dataclasses
import functools
import itertools
import re

import numpy as np
import pytest

from jattn.serving.request import SamplingParams
from jattn.serving.structured.params import StructuredOutputsParams
from tests.jattn.harness.recount import expected_tokens
from tests.jattn.harness.tiny import (
    VOCAB,
    drafting_engine,
    one_variant,
    run,
    tiny_engine,
    with_steps_of,
)
from tests.jattn.harness.tiny_grammars import END, grammar, text

BASE = SamplingParams(max_tokens=14, temperature=0.0, stop_token_ids=(END,))
LETTERS = {"regex": "[a-m]{3,40}"}
ASKED = {
    "regex": (LETTERS, {}),
    "whole": ({"regex": "[0-9]{5}"}, {}),
    "schema": ({"json": {"type": "integer"}, "disable_any_whitespace": True}, {"logit_bias": {END: 0.3}}),
    "choice": ({"choice": ["abc", "abd", "0123456789abcdef"]}, {"temperature": 1.0, "seed": 2}),
    "grammar": ({"grammar": 'start: "(" start ")" | /[a-c]+/'}, {"temperature": 2.0, "seed": 1}),
    "sampled": (LETTERS, {"temperature": 1.0, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.02}),
    "penalties": (LETTERS, {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.4}),
    "allowed": (LETTERS, {"allowed_token_ids": (66, 67, 5, 400, END), "frequency_penalty": 0.3}),
    "min_tokens": ({"regex": "[a-c]*"}, {"min_tokens": 6, "logit_bias": {END: 100}}),
    "end": ({"regex": "[a-m]*"}, {"logit_bias": {END: 100}}),
    "free": (None, {"temperature": 1.0, "seed": 8}),
    "free_greedy": (None, {}),
}


@pytest.fixture
def engine():
    engine = tiny_engine()
    engine.prepare_structured()
    return engine


def prompt_of(name):
    number = list(ASKED).index(name)
    return np.random.default_rng(number).integers(0, VOCAB, 4 + 3 * number).tolist()


def request_of(engine, name, **more):
    form, params = ASKED[name]
    form = form and StructuredOutputsParams(**form)
    params = dataclasses.replace(BASE, **params | more, structured_outputs=form)
    made = form and grammar(**ASKED[name][0])
    return engine.make_request(prompt_of(name), params, grammar=made)


@functools.cache
def expected(name):
    form, params = ASKED[name]
    return expected_tokens(
        prompt_of(name), dataclasses.replace(BASE, **params), grammar(**form).matcher if form else None
    )


@pytest.mark.parametrize("name", ASKED)
def test_request_alone_follows_its_grammar(engine, name):
    request = request_of(engine, name)
    assert run(engine, [request]) == [expected(name)]


def test_grammars_change_the_tokens():
    free = {name: expected_tokens(prompt_of(name), dataclasses.replace(BASE, **ASKED[name][1])) for name in ASKED}
    assert {name for name in ASKED if free[name] != expected(name)} == set(ASKED) - {"end", "free", "free_greedy"}


def test_crowd_with_preemption_follows_each_ones_grammar(engine):
    names = [*ASKED, *reversed(ASKED)]
    requests = [request_of(engine, name) for name in names]
    assert run(engine, requests) == [expected(name) for name in names]
    assert any(request.num_preemptions for request in requests if request.grammar)


def test_text_ends_where_its_grammar_does(engine):
    """With no end token, and for that reason; or where the request may have no more tokens."""
    reasons = {}
    for name in ("whole", "choice", "end", "regex"):
        request = request_of(engine, name)
        run(engine, [request])
        reasons[name] = request.finish_reason, request.generated[-1] == END
    assert reasons == {
        "whole": ("stop", False), "choice": ("stop", False), "end": ("stop", True), "regex": ("length", False),
    }  # fmt: skip
    assert re.fullmatch("[0-9]{5}", text(expected("whole")))


def test_text_that_does_not_end_at_end_tokens_goes_on_while_it_may(engine):
    """`ignore_eos`: the end token has such a bias that it would come at once."""
    params = {"stop_token_ids": (), "logit_bias": {END: 100}}
    request = request_of(engine, "end", **params)
    assert END not in run(engine, [request])[0]
    assert (request.finish_reason, len(request.generated)) == ("length", BASE.max_tokens)
    request = request_of(engine, "choice", **params)
    run(engine, [request])
    assert (request.finish_reason, text(request.generated) in ASKED["choice"][0]["choice"]) == ("stop", True)


def test_whole_text_ends_before_min_tokens(engine):
    """Nothing else may follow."""
    request = request_of(engine, "whole", min_tokens=10)
    assert run(engine, [request]) == [expected("whole")]
    assert request.finish_reason == "stop"


def test_grammar_that_grows_too_large_is_told_of(engine):
    """llguidance has limits that show only once it follows a text: here of the keys that may come after a quote."""
    form = {"json": {"type": "object", "properties": {f"k{i}": {} for i in range(600)}}, "disable_any_whitespace": True}
    params = dataclasses.replace(BASE, structured_outputs=StructuredOutputsParams(**form))
    request = engine.make_request([1, 2], params, grammar=grammar(**form))
    run(engine, [request])
    assert request.finish_reason == "error"
    assert request.error.startswith("The structured output cannot be followed after ")
    assert "items; max is" in request.error
    assert "<" not in request.error


def test_request_that_leaves_its_grammar_no_token_ends_by_an_error(engine):
    request, neighbour = request_of(engine, "regex", allowed_token_ids=(1, 2)), request_of(engine, "free")
    run(engine, [request, neighbour])
    assert (request.finish_reason, request.generated) == ("error", [])
    assert request.error.startswith("No token may come after")
    assert neighbour.generated == expected("free")


def test_logprobs_are_the_models_own(engine):
    """Of the tokens under the grammar, before it: those of the likeliest ones may be none that may come."""
    asked = request_of(engine, "regex", logprobs=1, prompt_logprobs=0)
    run(engine, [asked])
    assert asked.generated == expected("regex")
    assert len(asked.logprobs) == len(asked.generated)
    assert len(asked.prompt_logprobs) == len(asked.prompt) - 1
    free = engine.make_request(asked.prompt, dataclasses.replace(BASE, logprobs=1, max_tokens=1))
    run(engine, [free])
    assert asked.logprobs[0][free.generated[0]] == free.logprobs[0][free.generated[0]]
    assert max(found[token].rank for found, token in zip(asked.logprobs, asked.generated, strict=True)) > 1


class Watched:
    """An executor's steps, and the reads of its launches, in the order in which they are asked for."""

    def __init__(self, engine, monkeypatch):
        self.seen = []
        steps, read = engine.executor.compiled_steps, engine.executor.read

        def called(key, *arguments):
            self.seen.append(key.kind)
            return steps(key, *arguments)

        def reading(keep):
            for launch in read(keep):
                self.seen.append("read")
                yield launch

        monkeypatch.setattr(engine.executor, "compiled_steps", called)
        monkeypatch.setattr(engine.executor, "read", reading)


def test_steps_without_a_grammar_are_those_of_an_engine_that_knows_none(engine, monkeypatch):
    watched = Watched(engine, monkeypatch)
    structured, free = request_of(engine, "whole"), [request_of(engine, "free", max_tokens=n) for n in (30, 4)]
    engine.add(free[1])
    engine.step()
    engine.add(structured)
    engine.add(free[0])
    while engine.has_work:
        before = len(watched.seen)
        has_structured = structured.row is not None
        engine.step()
        kinds = set(watched.seen[before:]) - {"read"}
        apart = {"forward_decode", "forward_prefill", "sample_decode", "sample_prefill"}
        assert has_structured or structured.row is not None or not kinds & apart
    assert {"decode", "prefill", "forward_decode", "sample_decode"} <= set(watched.seen)
    assert structured.generated == expected("whole")


def test_masks_are_made_while_the_next_pass_runs(engine, monkeypatch):
    """The pass is enqueued before the launch ahead of it is read, and its choice of tokens after that."""
    watched = Watched(engine, monkeypatch)
    run(engine, [request_of(engine, "regex")])
    assert watched.seen[:2] == ["forward_prefill", "sample_prefill"]
    rounds = list(itertools.batched(watched.seen[2:], 3))
    assert rounds[:12] == [("forward_decode", "read", "sample_decode")] * 12


def test_interrupted_requests_follow_their_grammars_anew(engine, monkeypatch):
    engine = with_steps_of(engine)
    engine.executor._is_prepared = True
    steps, calls = engine.executor.compiled_steps, 0

    def interrupted(*arguments):
        nonlocal calls
        results = steps(*arguments)
        calls += 1
        if calls % 7 == 0 and calls < 60:
            raise KeyboardInterrupt
        return results

    monkeypatch.setattr(engine.executor, "compiled_steps", interrupted)
    requests = [request_of(engine, name) for name in ASKED]
    for request in requests:
        engine.add(request)
    num_interrupts = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 8
    assert [request.generated for request in requests] == [expected(name) for name in ASKED]


def test_grammar_that_was_cut_short_follows_all_tokens_anew(monkeypatch):
    tokens = expected("whole")
    whole, cut = grammar(regex="[0-9]{5}"), grammar(regex="[0-9]{5}")
    whole.follow(tokens[:2])
    cut.follow(tokens[:1])

    class Interrupts(list):
        def __getitem__(self, place):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut.follow(Interrupts(tokens[:2]))
    cut.follow(tokens[:2])
    assert cut.matcher.compute_bitmask() == whole.matcher.compute_bitmask()


def test_rows_with_a_grammar_draft_nothing_and_their_neighbours_do():
    names = [*ASKED, *reversed(ASKED)]
    with one_variant("full"):
        engine = drafting_engine()
        engine.prepare_structured()
        repeating = engine.make_request(
            [7] * 9, dataclasses.replace(BASE, frequency_penalty=-0.5, max_tokens=30, ignore_eos=True)
        )
        requests = [repeating, *(request_of(engine, name) for name in names)]
        assert run(engine, requests)[1:] == [expected(name) for name in names]
    structured = [request for request in requests if request.grammar]
    assert sum(request.drafts.drafted for request in structured) == 0
    assert repeating.drafts.accepted > 0


@pytest.mark.parametrize("drafts", [False, True])
def test_grammar_may_begin_behind_a_token(drafts):
    """Before it any token may come, as if there were no grammar; rows that wait for it draft nothing either."""
    begin, form = 100, {"regex": "[0-9]{2}"}
    params = dataclasses.replace(BASE, frequency_penalty=-0.5, max_tokens=40, stop_token_ids=())
    prompt = [7, begin] * 4
    free = expected_tokens(prompt, params)
    asked = dataclasses.replace(params, structured_outputs=StructuredOutputsParams(**form))
    with one_variant("full"):
        engine = drafting_engine() if drafts else tiny_engine()
        engine.prepare_structured()
        place = 5
        begins = grammar(**form).fork(free[place])
        request = engine.make_request(prompt, asked, grammar=begins)
        waiting = engine.make_request(prompt, asked, grammar=grammar(**form).fork(VOCAB + 1))
        run(engine, [request, waiting])
    place = free.index(free[place])
    assert request.generated[: place + 1] == free[: place + 1]
    assert re.fullmatch("[0-9]{2}", text(request.generated[place + 1 :]))
    assert waiting.generated == free
    assert request.drafts.drafted == waiting.drafts.drafted == 0


def test_request_without_its_grammar_is_refused(engine):
    params = dataclasses.replace(BASE, structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(ValueError, match="`structured_outputs` need a tokenizer"):
        engine.make_request([1], params)
