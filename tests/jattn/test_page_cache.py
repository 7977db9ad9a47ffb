"""Pages found by what they hold: the record alone, without requests."""

import pytest

from jattn.page_allocator import OutOfPages
from jattn.page_cache import PageCache


@pytest.fixture
def cache():
    return PageCache(6)


def on_record(cache, *contents, root="root"):
    """Owned pages of these contents, and their chain."""
    chain, pages = [root], cache.allocate(len(contents))
    cache.register(chain, contents, pages)
    return chain, pages


def found(cache, *contents, root="root"):
    return [page for _, page in cache.match([root], contents)]


def test_pages_are_found_by_their_content_and_all_before_it(cache):
    _, pages = on_record(cache, b"a", b"b")
    assert found(cache, b"a", b"b", b"c") == pages
    assert found(cache, b"a", b"x", b"b") == pages[:1]
    assert found(cache, b"b") == []
    assert found(cache, b"a", root="other") == []
    assert found(cache) == []


def test_match_goes_on_from_a_chain(cache):
    chain, pages = on_record(cache, b"a", b"b", b"c")
    assert [page for _, page in cache.match(chain[:2], [b"b", b"c"])] == pages[1:]
    assert cache.match(chain, [b"a"]) == []


def test_freed_pages_are_found_until_they_are_needed(cache):
    _, pages = on_record(cache, b"a", b"b", b"c")
    cache.free(pages)
    assert cache.num_free == 5
    assert found(cache, b"a", b"b", b"c") == pages
    cache.allocate(2)  # those that hold nothing known
    assert found(cache, b"a", b"b", b"c") == pages
    assert cache.allocate(1) == pages[2:]  # a sequence's end goes first
    assert found(cache, b"a", b"b", b"c") == pages[:2]
    cache.allocate(2)
    assert (cache.num_entries, cache.num_free) == (0, 0)


def test_page_freed_longest_ago_goes_first(cache):
    pages = {root: on_record(cache, b"a", root=root)[1] for root in "xyz"}
    for root in "yxz":
        cache.free(pages[root])
    cache.take(cache.match(["y"], [b"a"]))
    cache.free(pages["y"])
    cache.allocate(2)
    assert [cache.allocate(1) for _ in "xzy"] == [pages["x"], pages["z"], pages["y"]]


def test_taken_page_is_not_allocated(cache):
    _, pages = on_record(cache, b"a")
    cache.free(pages)
    entries = cache.match(["root"], [b"a"])
    assert cache.num_held(pages) == 1
    cache.take(entries)
    cache.take(entries)
    assert (cache.num_held(pages), cache.num_free) == (0, 4)
    assert pages[0] not in cache.allocate(4)
    cache.free(pages)
    assert cache.num_free == 0
    cache.free(pages)
    assert cache.num_free == 1


def test_more_than_is_free_is_refused_and_nothing_is_forgotten(cache):
    _, pages = on_record(cache, b"a", b"b")
    cache.free(pages)
    with pytest.raises(OutOfPages, match="6 pages were asked for, 5 of 5 are free"):
        cache.allocate(6)
    assert found(cache, b"a", b"b") == pages


def test_second_page_of_the_same_content_stays_off_the_record(cache):
    chain, first = on_record(cache, b"a")
    other, second = on_record(cache, b"a")
    assert (chain, cache.num_entries) == (other, 1)
    cache.free(first)
    cache.free(second)
    assert found(cache, b"a") == first
    assert cache.allocate(4)[-1] == second[0]


def test_what_follows_a_page_that_is_gone_is_not_found(cache):
    chain, pages = on_record(cache, b"a", b"b")
    cache.forget(pages[:1])
    assert found(cache, b"a", b"b") == []
    _, again = on_record(cache, b"a")
    assert found(cache, b"a", b"b") == again
    assert [page for _, page in cache.match(chain[:2], [b"b"])] == pages[1:]  # whoever has the chain has the pages


def test_what_followed_a_page_does_not_follow_what_it_holds_next(cache):
    _, pages = on_record(cache, b"a", b"b")
    cache.forget(pages[:1])
    cache.free(pages[:1])
    assert pages[0] in cache.allocate(cache.num_free)
    cache.register(["root"], [b"x"], pages[:1])
    assert found(cache, b"x", b"b") == pages[:1]


def test_forgotten_pages_stay_their_owners_and_are_free_without_a_content(cache):
    _, pages = on_record(cache, b"a", b"b")
    cache.forget(pages)
    assert (cache.num_entries, cache.num_free) == (0, 3)
    cache.free(pages)
    assert cache.num_held(pages) == 0
    assert cache.num_free == 5


def test_cleared_cache_finds_nothing_and_has_all_pages(cache):
    _, pages = on_record(cache, b"a", b"b")
    cache.free(pages[1:])
    cache.clear()
    assert (found(cache, b"a"), cache.num_entries, cache.num_free) == ([], 0, 4)
    cache.free(pages[:1])
    assert sorted(cache.allocate(5)) == [1, 2, 3, 4, 5]
