"""The KV-cache manager, and requests whose first tokens are in the pool before they come."""

import dataclasses

import numpy as np
import pytest

from jattn.serving.kv_cache import KVCacheManager
from jattn.serving.request import Request, SamplingParams
from jattn.serving.steps.loop_state import NOT_KNOWN
from tests.jattn.harness.tiny import CONFIG, VOCAB, drafting_engine, one_variant, run, tiny_engine

PROMPT = np.random.default_rng(1).integers(0, VOCAB, 22).tolist()  # two launches' worth
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


def make_request(prompt_len=9):
    params = SamplingParams(max_tokens=4)
    return Request(number=0, prompt=[1] * prompt_len, params=params, limit=prompt_len + 4, stop_ids=frozenset())


def test_allocate_and_grow_give_room_for_the_tokens_or_nothing():
    kv_cache = KVCacheManager(num_pages=5, page_size=4)
    first, second = make_request(), make_request()
    assert kv_cache.allocate(first, 9) == 0
    assert (len(first.pages), kv_cache.num_free) == (3, 1)
    assert kv_cache.allocate(second, 5) is None
    assert (second.pages, kv_cache.num_free) == ([], 1)
    assert kv_cache.grow(first, 12)
    assert kv_cache.grow(first, 13)
    assert not kv_cache.grow(first, 17)
    assert (len(first.pages), kv_cache.lacking(first, 17)) == (4, 1)
    kv_cache.free(first)
    assert (first.pages, kv_cache.num_free) == ([], 4)


class SharingManager(KVCacheManager):
    """Knows one request, and that those after it have the tokens of its full pages."""

    owner = None

    def cached_pages(self, request):
        if self.owner is None or self.owner.finished:
            return []
        return self.owner.pages[: (len(request.prompt) - 1) // self.page_size]


def test_page_of_two_requests_is_free_once_both_have_given_it_back():
    kv_cache = SharingManager(num_pages=8, page_size=4)
    kv_cache.owner, heir = make_request(), make_request()
    assert kv_cache.allocate(kv_cache.owner, 9) == 0
    assert kv_cache.allocate(heir, 9) == 8
    assert heir.pages[:2] == kv_cache.owner.pages[:2]
    assert kv_cache.num_free == 7 - 4
    kv_cache.free(kv_cache.owner)
    assert kv_cache.num_free == 7 - 3
    kv_cache.free(heir)
    assert kv_cache.num_free == 7


def test_shared_pages_are_not_asked_of_the_free_ones():
    kv_cache = SharingManager(num_pages=5, page_size=4)
    kv_cache.owner, heir = make_request(), make_request()
    kv_cache.allocate(kv_cache.owner, 9)
    assert kv_cache.allocate(heir, 12) == 8
    assert kv_cache.num_free == 0


@pytest.fixture(params=[tiny_engine, drafting_engine], ids=["plain", "drafting"])
def engine(request, monkeypatch):
    engine = request.param()
    manager = SharingManager(engine.config.num_pages, CONFIG.page_size)
    monkeypatch.setattr(engine, "kv_cache", manager)
    monkeypatch.setattr(engine.scheduler, "_kv_cache", manager)
    with one_variant("full"):
        yield engine


def heir_of(engine, prompt, params):
    """A request that shares pages with one that runs, once its first launch is under way."""
    owner, heir = engine.make_request(prompt, GREEDY), engine.make_request(prompt, params)
    engine.add(owner)
    while len(owner.generated) < 2:
        engine.step()
    engine.kv_cache.owner = owner
    engine.add(heir)
    engine.step()
    assert heir.num_cached == 20
    return heir


def test_request_with_cached_tokens_has_the_text_it_has_alone(engine):
    (expected,) = run(engine, [engine.make_request(PROMPT, GREEDY)])
    heir = heir_of(engine, PROMPT, GREEDY)
    run(engine)
    assert heir.generated == expected


def test_first_part_behind_cached_tokens_forgets_the_rows_former_request(engine):
    """All rows have had requests with rules and a text on record."""
    ruled = dataclasses.replace(GREEDY, presence_penalty=-1.0)
    run(engine, [engine.make_request([300 + i] * 30, ruled) for i in range(CONFIG.max_num_seqs)])
    heir = heir_of(engine, PROMPT, ruled)
    state = engine.executor.state
    in_prompt = np.asarray(state.history.in_prompt[heir.row])
    assert set(np.flatnonzero(in_prompt).tolist()) == set(PROMPT[20:])
    assert int(np.sum(state.history.output_counts[heir.row])) <= 1  # the token that the prefill gives
    if state.tokens:
        ids = state.tokens.ids[heir.row].tolist()
        assert ids[:20] == [NOT_KNOWN] * 20
        assert ids[20:22] == PROMPT[20:]
        assert set(ids[23:]) == {NOT_KNOWN}
    run(engine)
