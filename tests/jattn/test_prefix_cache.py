"""The prefix cache under a model: what is not computed again gives the text, and the numbers, of what is."""

import dataclasses
import functools
from importlib.metadata import entry_points

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.checkpoint import Checkpoint
from jattn.model import model_class
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.frontend.text import Tokenizer
from jattn.serving.request import SamplingParams
from jattn.serving.steps.draft_model import DraftModel
from jattn.serving.steps.drafting import NgramDrafting
from tests.jattn.harness.tiny import CONFIG, VOCAB, drafting_engine, one_variant, run
from tests.often import often, slow

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "drawn": dataclasses.replace(GREEDY, temperature=0.7, seed=3),
    "penalties": dataclasses.replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
}
SIZES = EngineConfig(
    num_pages=32, page_size=8, max_num_seqs=4, max_context_len=160, prefill_tokens=64, smallest_prefill_bucket=64
)
PREFIX = "class Node:\n    def __init__(self, left, right):\n        self.left = left\n        self.right = right\n\n"
ENDS = ("    def depth(self):", "    def walk(self):", "", "    def __repr__(self):\n        return")


@functools.cache
def checkpoint():
    (point,) = entry_points(group="jattn.checkpoints", name="default")
    return Checkpoint(point.load()())


@functools.cache
def bundled():
    """Its text depends on every key, as that of random weights does not."""
    return model_class(checkpoint().architecture).from_checkpoint(checkpoint(), dtype=jnp.float32)


@functools.cache
def prompts():
    tokenizer = Tokenizer(checkpoint().path)
    return [tokenizer.encode(PREFIX + end) for end in ENDS]


@functools.cache
def engine_of(**changes):
    """Tests share it, and leave it idle."""
    draft_model = None
    if isinstance(changes.get("speculative"), DraftModel):
        draft_model = changes["speculative"].load(checkpoint(), dtype=jnp.float32)
    with one_variant("full"):
        return Engine(bundled(), dataclasses.replace(SIZES, **changes), draft_model=draft_model)


@pytest.fixture(autouse=True)
def variant():
    with one_variant("full"):
        yield


@pytest.fixture
def engine():
    return engine_of()


def cold(engine, prompt, params, **options):
    """The request's text where nothing is in the pool yet."""
    assert engine.reset_prefix_cache()
    request = engine.make_request(prompt, params, **options)
    run(engine, [request])
    assert request.num_cached_tokens == 0
    return request.generated


def hits(engine):
    return engine.kv_cache.prefix_cache_stats.hits


def test_the_prompts_share_pages_and_not_all_of_them():
    shared = next(i for i, tokens in enumerate(zip(*prompts(), strict=False)) if len(set(tokens)) > 1)
    assert 2 * SIZES.page_size < shared < min(map(len, prompts()))


@pytest.mark.parametrize("name", often(PARAMS, ("penalties",)))
def test_warm_text_is_the_cold_one(engine, name):
    """In one launch, when all have ended, and as a conversation that goes on."""
    params = PARAMS[name]
    expected = [cold(engine, prompt, params) for prompt in prompts()]
    turns = [[*prompt, *answer, *prompts()[0][:9]] for prompt, answer in zip(prompts(), expected, strict=True)]
    expected_turns = [cold(engine, turn, params) for turn in turns]
    engine.reset_prefix_cache()
    for texts, expectation in ((prompts(), expected), (prompts(), expected), (turns, expected_turns)):
        requests = [engine.make_request(text, params) for text in texts]
        before = hits(engine)
        assert run(engine, requests) == expectation
        assert sum(request.num_cached_tokens for request in requests) == hits(engine) - before > 0
        if texts is turns:
            assert all(
                len(turn) - request.num_cached_tokens < 20 for turn, request in zip(turns, requests, strict=True)
            )


@pytest.mark.parametrize("max_chunk_tokens", [5, slow(24)])
def test_warm_text_is_the_cold_one_in_chunks(engine, monkeypatch, max_chunk_tokens):
    """Requests that advance side by side take over what another one computes ahead of them."""
    expected = [cold(engine, prompt, GREEDY) for prompt in prompts()]
    engine.reset_prefix_cache()
    monkeypatch.setattr(engine.scheduler, "_max_chunk_tokens", max_chunk_tokens)
    requests = [engine.make_request(prompt, GREEDY) for prompt in prompts()]
    assert run(engine, requests) == expected
    assert min(request.num_cached_tokens for request in requests[1:]) >= 2 * SIZES.page_size


@pytest.mark.parametrize("name", often(PARAMS, ("penalties",)))
def test_preempted_requests_find_their_keys_again(engine, name):
    params = dataclasses.replace(PARAMS[name], max_tokens=54)
    distinct = [[10 + i, *prompt] for i, prompt in enumerate(prompts())]
    expected = [cold(engine, prompt, params) for prompt in distinct]
    requests = [engine.make_request(prompt, params) for prompt in distinct]
    before = engine.kv_cache.prefix_cache_stats.resumed_hits
    assert run(engine, requests) == expected
    assert any(request.num_preemptions for request in requests)
    assert engine.kv_cache.prefix_cache_stats.resumed_hits > before


def test_requests_of_another_salt_have_the_text_and_no_hit(engine):
    expected = cold(engine, prompts()[0], GREEDY, cache_salt="a")
    for salt, is_hit in (("b", False), (None, False), ("a", True), ("b", True)):
        request = engine.make_request(prompts()[0], GREEDY, cache_salt=salt)
        assert run(engine, [request]) == [expected]
        assert bool(request.num_cached_tokens) == is_hit


@pytest.mark.parametrize("salt", ["", 5])
def test_salt_that_is_no_text_is_refused(engine, unchecked, salt):
    with pytest.raises(ValueError, match=rf"^`cache_salt` must be None or a text that is not empty. Got {salt!r}\.$"):
        engine.make_request([1], GREEDY, cache_salt=salt)


def test_prompt_logprobs_are_computed_and_no_page_is_skipped(engine):
    params = dataclasses.replace(GREEDY, prompt_logprobs=2)
    run(engine, [engine.make_request(prompts()[0], GREEDY)])
    request = engine.make_request(prompts()[0], params)
    run(engine, [request])
    assert request.num_cached_tokens == 0
    assert sorted(request.prompt_logprobs) == list(range(1, len(request.prompt)))


def poison(engine, pages):
    """Makes all that these pages hold NaN."""
    pages = jnp.array(sorted(pages))
    pool = engine.executor.pool
    engine.executor.pool = jax.tree.map(lambda leaf: _with_nan(leaf, pages, engine.config.num_pages), pool)


def _with_nan(leaf, pages, num_pages):
    axis = leaf.shape.index(num_pages)
    return leaf.at[(slice(None),) * axis + (pages,)].set(jnp.nan)


def test_pages_that_are_not_on_record_are_never_read(engine):
    expected = [cold(engine, prompt, GREEDY) for prompt in prompts()]
    engine.reset_prefix_cache()
    for _ in range(3):
        on_record = set(engine.kv_cache._lists[0]._key_of)
        poison(engine, set(range(1, SIZES.num_pages)) - on_record)
        before = hits(engine)
        assert run(engine, [engine.make_request(prompt, GREEDY) for prompt in prompts()]) == expected
    assert hits(engine) > before
    engine.executor.restart()
    engine.reset_prefix_cache()


def test_error_takes_its_pages_off_the_record(engine):
    expected = cold(engine, prompts()[0], GREEDY)
    poison(engine, engine.kv_cache._lists[0]._key_of)
    broken, again = (engine.make_request(prompts()[0], GREEDY) for _ in range(2))
    run(engine, [broken])
    assert (broken.finish_reason, broken.num_cached_tokens > 0) == ("error", True)
    assert run(engine, [again]) == [expected]
    assert again.num_cached_tokens == 0
    engine.executor.restart()
    engine.reset_prefix_cache()


def test_restart_clears_it(engine, monkeypatch):
    expected = cold(engine, prompts()[0], GREEDY)
    steps = engine.executor.compiled_steps

    def interrupted(*arguments):
        steps(*arguments)
        raise KeyboardInterrupt

    request = engine.make_request(prompts()[0], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "compiled_steps", interrupted)
        engine.add(request)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert request.num_cached_tokens > 0
    run(engine)
    assert (request.generated, request.num_cached_tokens) == (expected, 0)


def test_reset_waits_for_what_is_served(engine):
    request = engine.make_request(prompts()[0], GREEDY)
    engine.add(request)
    engine.step()
    assert not engine.reset_prefix_cache()
    run(engine)
    assert engine.reset_prefix_cache()
    assert engine.kv_cache._lists[0].num_entries == 0


def test_without_it_nothing_is_kept(engine, monkeypatch):
    engine.reset_prefix_cache()
    monkeypatch.setattr(engine.kv_cache, "_caches", False)
    before = dataclasses.replace(engine.kv_cache.prefix_cache_stats)
    requests = [engine.make_request(prompts()[0], GREEDY) for _ in range(3)]
    run(engine, requests)
    assert engine.kv_cache.prefix_cache_stats == before
    assert engine.kv_cache._lists[0].num_entries == 0


RULED = dataclasses.replace(GREEDY, presence_penalty=-1.0, repetition_penalty=1.1)


@pytest.mark.parametrize(("prompt_len", "least"), [(22, 20), (55, 36)], ids=["one_note", "several"])
def test_tokens_that_are_skipped_are_on_record(prompt_len, least):
    """And nothing of the requests that had the row before."""
    engine = drafting_engine()
    prompt = np.random.default_rng(1).integers(0, VOCAB, prompt_len).tolist()
    params = dataclasses.replace(RULED, max_tokens=8)
    text = cold(engine, prompt, params)
    short = dataclasses.replace(params, max_tokens=1)
    run(engine, [engine.make_request([300 + i] * 2, short) for i in range(CONFIG.max_num_seqs)])
    heir = engine.make_request(prompt, params)
    engine.add(heir)
    engine.step()
    assert heir.num_cached_tokens >= least
    state = engine.executor.state
    assert set(np.flatnonzero(np.asarray(state.history.in_prompt[heir.row])).tolist()) == set(prompt)
    assert state.tokens.ids[heir.row, :prompt_len].tolist() == prompt
    assert int(np.sum(state.history.output_counts[heir.row])) <= 1  # the token that the prefill gives
    run(engine)
    assert heir.generated == text


def test_only_requests_that_need_it_have_a_note(engine, monkeypatch):
    kinds, steps = [], engine.executor.compiled_steps

    def call(key, *arguments):
        kinds.append(key.kind)
        return steps(key, *arguments)

    cold(engine, prompts()[0], GREEDY)
    monkeypatch.setattr(engine.executor, "compiled_steps", call)
    run(engine, [engine.make_request(prompts()[0], dataclasses.replace(GREEDY, logprobs=1, min_tokens=2))])
    assert "note" not in kinds
    run(engine, [engine.make_request(prompts()[0], PARAMS["penalties"])])
    assert kinds.count("note") == 1


VARIED = {
    "ngram": {"speculative": NgramDrafting(num_draft_tokens=3)},
    "draft_model": {"speculative": DraftModel(num_layers=3, num_draft_tokens=2)},
    "fp8": {"kv_cache_dtype": "fp8_e5m2"},
    "mixed": {"mixed_steps": True},
    "debug_checks": {"debug_checks": True},
    "page_of_one": {"page_size": 1, "num_pages": 256},
    "flash_attention": {"backend": "flash_attention"},
    "flashinfer": {"backend": "flashinfer"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("changes", VARIED)
def test_warm_text_is_the_cold_one_in_any_engine(changes, name):
    engine = engine_of(**VARIED[changes])
    test_warm_text_is_the_cold_one(engine, name)
    test_preempted_requests_find_their_keys_again(engine, name)
