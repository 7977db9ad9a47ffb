"""Models with windows under the engine: their layers keep the pages that they see, and nothing else changes."""

import dataclasses
import functools
import itertools
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.page_lists import ALL_KEYS
from jattn.serving import resolved_config
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.request import SamplingParams
from jattn.serving.steps.draft_model import DraftModel
from jattn.serving.steps.drafting import NgramDrafting
from tests.jattn.harness.tiny import one_variant, run
from tests.models.harness.goldens import load
from tests.often import often

CASES = ("gemma2", "gemma3", "gpt_oss", "llama4", "ministral")
SIZES = EngineConfig(
    num_pages=96,
    page_size=4,
    max_num_seqs=3,
    max_context_len=96,
    prefill_tokens=16,
    smallest_prefill_bucket=16,
)
LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, logprobs=0)
SHORT = dataclasses.replace(LONG, max_tokens=8)
PROMPTS = [
    np.random.default_rng(number).integers(3, 64, length).tolist() for number, length in enumerate((31, 5, 18, 24))
]
SHARED = np.random.default_rng(9).integers(3, 64, 26).tolist()


@pytest.fixture(autouse=True)
def variant():
    with one_variant("full"):
        yield


@functools.cache
def engine_of(case, *, is_apart=True, draft_case=None, **changes):
    """Tests share it, and leave it idle.

    Args:
        is_apart: Whether windows have page lists of their own.
        draft_case: The model that drafts for it.
    """
    draft = None if draft_case is None else load(draft_case)
    narrower = resolved_config.narrower_spans if is_apart else lambda *_: ()
    with one_variant("full"), mock.patch.object(resolved_config, "narrower_spans", narrower):
        return Engine(load(case), dataclasses.replace(SIZES, **changes), draft_model=draft)


@functools.cache
def expected(case, prompt, params=LONG):
    """Tokens and their log-probabilities where all layers keep all pages, of one request alone."""
    engine = engine_of(case, is_apart=False, enable_prefix_caching=False)
    assert engine.config.windows == ()
    request = engine.make_request(list(prompt), params)
    run(engine, [request])
    return request.generated, chosen(request)


def chosen(request):
    """The log-probability of each token."""
    return np.array([of[token].logprob for token, of in zip(request.generated, request.logprobs, strict=True)])


def assert_expected(case, requests):
    for request in requests:
        tokens, logprobs = expected(case, tuple(request.prompt), request.params)
        assert request.generated == tokens
        np.testing.assert_allclose(chosen(request), logprobs, atol=2e-4)


def poison(engine):
    """Makes all that neither a request nor the record has NaN, but for page 0."""
    groups = []
    for group in engine.executor.pool.groups:
        pages = engine.kv_cache._lists[group.page_list]
        taken = [page == 0 or pages._ref_counts[page] > 0 or page in pages._key_of for page in range(group.num_pages)]
        # Of one shape, however many there are: by their numbers, each count of them would be compiled.
        is_free = ~jnp.array(taken).reshape(1, -1, *[1] * (group.k.ndim - 2))
        k, v = (jnp.where(is_free, jnp.nan, array) for array in (group.k, group.v))
        groups.append(dataclasses.replace(group, k=k, v=v))
    engine.executor.pool = dataclasses.replace(engine.executor.pool, groups=tuple(groups))


def served(engine, requests):
    """The most pages of a window that a request had while all were served, what is nobody's being NaN before a step."""
    most = 0
    for request in requests:
        engine.add(request)
    while engine.has_work:
        poison(engine)
        engine.step()
        with_pages = [request.page_lists for request in requests if request.page_lists]
        for own, pages in zip(zip(*with_pages, strict=True), engine.kv_cache._lists, strict=False):
            owned = {page for of_request in own for page in of_request if page}
            assert len(owned) == pages.num_pages - pages.num_free
        most = max([most, *(sum(page > 0 for page in lists[1]) for lists in with_pages)])
    assert engine.kv_cache.is_free
    return most


@pytest.mark.parametrize("case", often(CASES, ("gpt_oss",)))
def test_window_layers_keep_what_they_see_and_give_the_same_tokens(case):
    engine = engine_of(case, enable_prefix_caching=False)
    full, window = engine.executor.pool.groups
    assert (full.page_list, full.span, full.num_pages) == (0, ALL_KEYS, SIZES.num_pages)
    assert (window.page_list, window.span) == (1, engine.config.windows[0])
    assert window.num_pages == engine.config.window_lists[0].num_pages < SIZES.num_pages // 2
    requests = [engine.make_request(prompt, LONG) for prompt in PROMPTS]
    most = served(engine, requests)
    assert most <= -(-(window.span.most_keys + SIZES.prefill_tokens) // SIZES.page_size) + 1
    assert_expected(case, requests)


@pytest.mark.parametrize("case", often(CASES, ("llama4",)))
def test_warm_text_is_the_cold_one(case):
    """What is found is what every layer needs: of a window its last pages."""
    engine = engine_of(case)
    assert engine.reset_prefix_cache()
    texts = [[*SHARED, *prompt[:9]] for prompt in PROMPTS] + [SHARED]
    requests = []
    for _ in range(3):
        requests = [engine.make_request(text, SHORT) for text in texts]
        before = engine.kv_cache.prefix_cache_stats.hits
        served(engine, requests)
        assert_expected(case, requests)
        hits = engine.kv_cache.prefix_cache_stats.hits - before
        assert sum(request.num_cached_tokens for request in requests) == hits
    assert all(request.num_cached_tokens >= 24 for request in requests)


@pytest.mark.parametrize("case", often(CASES, ("llama4",)))
def test_conversation_goes_on_where_its_window_is(case):
    """Though most of its earlier pages went back without being on record."""
    engine = engine_of(case)
    assert engine.reset_prefix_cache()
    first = engine.make_request(PROMPTS[2], LONG)
    served(engine, [first])
    turn = engine.make_request([*first.tokens, 5, 6, 7], SHORT)
    served(engine, [turn])
    assert turn.num_cached_tokens == (first.num_tokens - 1) // SIZES.page_size * SIZES.page_size
    assert_expected(case, [turn])


DRAFTER = DraftModel(checkpoint="loaded already", num_draft_tokens=2)
VARIED = {
    "ngram": {"speculative": NgramDrafting(num_draft_tokens=3, min_ngram=1)},
    "draft_with_windows": {"draft_case": "gpt_oss", "speculative": DRAFTER},
    "draft_with_chunks": {"draft_case": "llama4", "speculative": DRAFTER},
    "mixed": {"mixed_steps": True},
    "chunks": {"max_chunk_tokens": 5},
    "debug_checks": {"debug_checks": True},
    "page_of_one": {"page_size": 1, "num_pages": 300},
    "few_pages": {"num_pages": 26},
    "flash_attention": {"backend": "flash_attention"},
    "flashinfer": {"backend": "flashinfer"},
}
# Drafts are verified beside windows in test_gpt_oss, prompts in chunks over chunks of keys in test_decoder.
OFTEN = [("gpt_oss", "few_pages")]


@pytest.mark.parametrize("varied", often(itertools.product(("gemma3", "gpt_oss", "llama4"), VARIED), OFTEN), ids=str)
def test_any_engine_gives_the_same_tokens(varied):
    case, name = varied
    if name == "flashinfer" and case != "gemma3":
        pytest.skip("pymllm's backend has neither chunks nor sinks")
    engine = engine_of(case, **VARIED[name])
    assert engine.reset_prefix_cache()
    for _ in range(2):
        requests = [engine.make_request(prompt, LONG) for prompt in (*PROMPTS, [*SHARED, 3], [*SHARED, 4])]
        served(engine, requests)
        assert_expected(case, requests)
    assert engine.kv_cache.prefix_cache_stats.hits > 0
