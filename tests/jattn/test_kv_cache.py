"""The KV-cache manager: room for requests, and which of their first tokens are in the pool before they come."""

import contextlib
import dataclasses

import pytest

from jattn.page_lists import AttentionSpan, WindowList
from jattn.serving.kv_cache import KVCacheManager, PrefixCacheStats
from jattn.serving.request import Request, SamplingParams


def make_request(prompt_len=9, cache_salt=None, **params):
    return Request(
        number=0,
        prompt=list(range(prompt_len)),
        params=SamplingParams(max_tokens=4, **params),
        limit=prompt_len + 4,
        stop_ids=frozenset(),
        cache_salt=cache_salt,
    )


def make_manager(num_pages=8):
    return KVCacheManager(num_pages, 4, enable_prefix_caching=True)


def test_allocate_and_grow_give_room_for_the_tokens_or_nothing():
    kv_cache = make_manager(5)
    first, second = make_request(), make_request()
    assert kv_cache.allocate(first, 9)
    assert (len(first.pages), kv_cache.num_free) == (3, 1)
    assert not kv_cache.allocate(second, 5)
    assert (second.pages, kv_cache.num_free) == ([], 1)
    assert kv_cache.grow(first, 12)
    assert kv_cache.grow(first, 13)
    assert not kv_cache.grow(first, 17)
    assert len(first.pages) == 4
    assert kv_cache.has_room([(first, 16)])
    assert not kv_cache.has_room([(first, 17)])
    kv_cache.free(first)
    assert (first.pages, first.chain, kv_cache.num_free) == ([], [], 4)


def test_request_is_given_the_full_pages_of_another_but_never_all_of_its_tokens():
    kv_cache = make_manager(12)
    first, same, longer, shorter = (make_request(prompt_len) for prompt_len in (8, 8, 11, 3))
    kv_cache.allocate(first, 9)
    kv_cache.register(first, 8)
    for heir, num_shared in ((same, 1), (longer, 2), (shorter, 0)):
        assert kv_cache.allocate(heir, heir.num_tokens)
        assert kv_cache.adopt(heir) == 4 * num_shared == heir.num_cached_tokens
        assert heir.pages[:num_shared] == first.pages[:num_shared]
        assert not set(heir.pages[num_shared:]) & set(first.pages)
    assert kv_cache.prefix_cache_stats == PrefixCacheStats(queries=8 + 8 + 11 + 3, hits=4 + 8)


def test_page_of_two_requests_is_free_once_both_have_given_it_back():
    kv_cache = make_manager()
    first, heir = make_request(), make_request()
    kv_cache.allocate(first, 9)
    kv_cache.register(first, 9)
    kv_cache.allocate(heir, 9)
    assert kv_cache.num_free == 7 - 4
    kv_cache.free(first)
    assert kv_cache.num_free == 7 - 3
    kv_cache.free(heir)
    assert kv_cache.num_free == 7


def test_pages_that_somebody_owns_are_not_asked_of_the_free_ones():
    kv_cache = make_manager(5)
    first, heir = make_request(), make_request()
    kv_cache.allocate(first, 9)
    kv_cache.register(first, 9)
    assert kv_cache.allocate(heir, 12)
    assert kv_cache.num_free == 0


def test_pages_that_nobody_owns_are():
    """Of four free pages two are found: a request of five has no room, and one of four takes all."""
    kv_cache = make_manager(5)
    first, large, heir = (make_request() for _ in range(3))
    kv_cache.allocate(first, 9)
    kv_cache.register(first, 9)
    pages = first.pages[:2]
    kv_cache.free(first)
    assert not kv_cache.allocate(large, 17)
    assert (large.pages, kv_cache.num_free) == ([], 4)
    assert kv_cache.allocate(heir, 16)
    assert (heir.pages[:2], len(set(heir.pages)), kv_cache.num_free) == (pages, 4, 0)


def test_what_is_found_is_not_given_away_for_what_is_lacking():
    """Though it is free for the longest time."""
    kv_cache = make_manager(4)
    first, other, heir = make_request(4), make_request(4, cache_salt="other"), make_request(9)
    places = []
    for request in (first, other):
        kv_cache.allocate(request, 4)
        kv_cache.register(request, 4)
        places += request.pages
        kv_cache.free(request)
    assert kv_cache.allocate(heir, 9)
    assert (heir.pages[0], len(set(heir.pages)), heir.num_cached_tokens) == (places[0], 3, 4)


def test_what_others_compute_meanwhile_takes_the_place_of_own_pages():
    kv_cache = make_manager(9)
    first, heir = make_request(), make_request()
    for request in (first, heir):
        kv_cache.allocate(request, 10)
    kv_cache.register(heir, 2)  # has begun with its first page
    kv_cache.register(first, 4)
    assert kv_cache.adopt(heir) == 4
    kv_cache.register(first, 9)
    assert kv_cache.adopt(heir) == 8
    assert heir.pages[:2] == first.pages[:2]
    assert kv_cache.num_free == 8 - 4
    assert heir.num_cached_tokens == 8


@pytest.mark.parametrize(("salts", "is_hit"), [(("a", "a"), True), (("a", "b"), False), ((None, "a"), False)])
def test_only_requests_of_one_salt_share(salts, is_hit):
    kv_cache = make_manager(16)
    for pair in (salts, salts[::-1]):
        first, heir = (make_request(cache_salt=salt) for salt in pair)
        kv_cache.allocate(first, 9)
        kv_cache.register(first, 9)
        kv_cache.free(first)
        kv_cache.allocate(heir, 9)
        assert bool(heir.num_cached_tokens) == is_hit
        kv_cache.free(heir)
        kv_cache.clear()


def test_request_that_asks_for_its_prompts_logprobs_skips_nothing_but_is_on_record():
    kv_cache = make_manager(12)
    first, asking, heir = make_request(), make_request(prompt_logprobs=1), make_request()
    kv_cache.allocate(first, 9)
    kv_cache.register(first, 4)
    kv_cache.allocate(asking, 9)
    assert kv_cache.adopt(asking) == 0
    kv_cache.register(asking, 9)
    kv_cache.allocate(heir, 9)
    assert heir.pages[:2] == [first.pages[0], asking.pages[1]]
    assert kv_cache.prefix_cache_stats == PrefixCacheStats(queries=18, hits=8)


def test_resumed_request_counts_apart():
    kv_cache = make_manager()
    request = make_request()
    kv_cache.allocate(request, 9)
    kv_cache.register(request, 9)
    kv_cache.free(request)
    request.num_preemptions = 1
    kv_cache.allocate(request, 9)
    assert kv_cache.prefix_cache_stats == PrefixCacheStats(queries=9, resumed_queries=9, resumed_hits=8)
    assert request.num_cached_tokens == 0


def test_forgotten_pages_are_not_found():
    kv_cache = make_manager()
    first, heir = make_request(), make_request()
    kv_cache.allocate(first, 9)
    kv_cache.register(first, 9)
    kv_cache.forget(first)
    kv_cache.free(first)
    kv_cache.allocate(heir, 9)
    assert heir.num_cached_tokens == 0


def test_clear_waits_for_the_last_owner():
    kv_cache = make_manager()
    first, heir = make_request(), make_request()
    kv_cache.allocate(first, 9)
    kv_cache.register(first, 9)
    assert not kv_cache.clear()
    kv_cache.free(first)
    assert kv_cache.clear()
    kv_cache.allocate(heir, 9)
    assert heir.num_cached_tokens == 0


def test_without_the_cache_nothing_is_shared_or_counted():
    kv_cache = KVCacheManager(8, 4)
    first, heir = make_request(), make_request()
    for request in (first, heir):
        kv_cache.allocate(request, 9)
        assert kv_cache.adopt(request) == 0
        kv_cache.register(request, 9)
    assert not set(first.pages) & set(heir.pages)
    assert dataclasses.asdict(kv_cache.prefix_cache_stats) == dict.fromkeys(
        ("queries", "hits", "resumed_queries", "resumed_hits"), 0
    )


WINDOW = WindowList(AttentionSpan(window_left=5), 8)  # of pages of 4, what a query sees is in two or three


def windowed(num_pages=12, *windows):
    return KVCacheManager(num_pages, 4, windows=windows or (WINDOW,), enable_prefix_caching=True)


def begun(kv_cache, request, num_tokens):
    """The request, so many of whose tokens have a launch."""
    assert kv_cache.allocate(request, request.num_tokens)
    kv_cache.adopt(request)
    assert kv_cache.grow(request, num_tokens)
    kv_cache.register(request, num_tokens)
    return request


def test_window_has_pages_as_far_as_tokens_are_computed_and_as_they_are_seen():
    kv_cache = windowed()
    request = begun(kv_cache, make_request(21), 8)
    assert list(map(len, request.page_lists)) == [6, 2]
    kv_cache.release([(request, 8)])  # sees 3 .. 8
    assert 0 not in request.page_lists[1]
    assert kv_cache.grow(request, 20)
    kv_cache.release([(request, 20)])  # sees 15 .. 20
    assert [page > 0 for page in request.page_lists[1]] == [False] * 3 + [True] * 2
    assert 0 not in request.pages
    assert kv_cache._lists[1].num_free == 7 - 2
    kv_cache.release([(request, 20)])
    kv_cache.free(request)
    assert kv_cache.is_free


def test_growth_needs_room_in_every_list_and_takes_none_in_part():
    kv_cache = windowed(12, WINDOW._replace(num_pages=4))
    request = begun(kv_cache, make_request(40), 12)
    assert not kv_cache.grow(request, 13)
    assert not kv_cache.has_room([(request, 13)])
    assert kv_cache.has_room([(request, 12)])
    assert list(map(len, request.page_lists)) == [10, 3]
    kv_cache.release([(request, 12)])  # sees 7 .. 12
    assert kv_cache.has_room([(request, 16)])
    assert kv_cache.grow(request, 16)


def test_prefix_is_found_where_each_list_has_what_the_query_behind_it_sees():
    """A query at 16 sees keys from 11 on, in pages 2 and 3; one at 12 pages 1 and 2, one at 8 pages 0 and 1."""
    kv_cache = windowed()
    first = begun(kv_cache, make_request(17), 17)
    ids = first.chain[1:]
    kv_cache.free(first)
    for gone, num_cached_tokens in ((0, 16), (1, 16), (2, 8), (3, 12)):
        with forgotten(kv_cache._lists[1], ids[gone]):
            heir = make_request(17)
            kv_cache.allocate(heir, 17)
            assert heir.num_cached_tokens == num_cached_tokens
            kv_cache.free(heir)


@contextlib.contextmanager
def forgotten(pages, id):
    """While the page of an id is off the record."""
    entry = pages._entries.pop(id)
    yield
    pages._entries[id] = entry


def test_what_is_found_has_page_0_before_what_is_seen():
    kv_cache = windowed()
    kv_cache.free(begun(kv_cache, make_request(17), 17))
    heir = make_request(19)
    assert kv_cache.allocate(heir, 19)
    assert [page > 0 for page in heir.page_lists[1]] == [False, False, True, True]
    assert list(map(len, heir.page_lists)) == [5, 4]
    assert kv_cache._lists[1].num_free == 7 - 2
    kv_cache.free(heir)
    assert kv_cache.is_free


def test_own_pages_before_what_is_seen_go_back_when_others_are_found():
    kv_cache = windowed(20)
    heir, first = begun(kv_cache, make_request(21), 5), begun(kv_cache, make_request(21), 21)
    assert kv_cache.adopt(heir) == 20
    assert [page > 0 for page in heir.page_lists[1]] == [False, False, False, True, True]
    assert heir.page_lists[1][3:] == first.page_lists[1][3:5]
    assert kv_cache._lists[1].num_free == 7 - 6


def test_error_takes_what_went_back_off_the_record_too():
    """The text's pages in the first list are another's: of the window this request alone has recorded some."""
    kv_cache = windowed(20)
    broken = begun(kv_cache, make_request(17), 17)
    kv_cache.release([(broken, 17)])
    assert kv_cache._lists[1].num_entries == 4
    kv_cache.forget(broken)
    kv_cache.free(broken)
    assert kv_cache._lists[1].num_entries == kv_cache._lists[0].num_entries == 0
    assert len(kv_cache._lists[1]._free) == 7
    heir = make_request(17)
    kv_cache.allocate(heir, 17)
    assert heir.num_cached_tokens == 0


def test_chunk_sees_nothing_before_its_edge():
    kv_cache = windowed(12, WindowList(AttentionSpan(chunk_size=8), 8))
    first = begun(kv_cache, make_request(17), 17)
    kv_cache.release([(first, 15)])
    assert [page > 0 for page in first.page_lists[1]] == [False, False, True, True, True]
    kv_cache.release([(first, 16)])
    assert [page > 0 for page in first.page_lists[1]] == [False] * 4 + [True]
    kv_cache.free(first)
    heir = make_request(17)
    assert kv_cache.allocate(heir, 17)
    assert (heir.num_cached_tokens, heir.page_lists[1]) == (16, [0, 0, 0, 0])
