"""KVCacheManager: which pages of the pool are whose; the policy asks for room in tokens and sees no page."""

import dataclasses
from array import array
from collections.abc import Iterator

from jattn.page_cache import Entry, PageCache
from jattn.serving.request import Request

_PAGES_AT_ONCE = 64  # whose tokens become bytes together: most of a long prompt's are looked up, or hardly any


@dataclasses.dataclass(kw_only=True)
class PrefixCacheStats:
    """What the prefix cache was asked for and what it had, in tokens, since the engine was made.

    Attributes:
        queries: Tokens of the requests that were looked up, each once.
        hits: Those of them whose keys were in the pool, so that nothing computed them again.
        resumed_queries, resumed_hits: Likewise of requests that go on after they have lost their pages; not in the
            others.
    """

    queries: int = 0
    hits: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0


class KVCacheManager:
    """Gives requests room in the pool and takes it back; it alone changes `Request.pages` and `Request.chain`.

    A page may have several owners, and is free once the last of them has given it back. With the prefix cache, full
    pages stay on record under the tokens that they hold until they are needed, and requests that begin with these
    tokens, of the same `cache_salt`, share them.

    Args:
        num_pages: Pages of the pool, the reserved page 0 included.
        page_size: Tokens a page.
        enable_prefix_caching: Whether pages are put on record.
    """

    def __init__(self, num_pages: int, page_size: int, *, enable_prefix_caching: bool = False):
        self.page_size = page_size
        self.prefix_cache_stats = PrefixCacheStats()
        self._caches = enable_prefix_caching
        self._cache = PageCache(num_pages)

    @property
    def num_pages(self) -> int:
        """Pages that requests can have in total."""
        return self._cache.num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return self._cache.num_free

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def lacking(self, request: Request, num_tokens: int) -> int:
        """Pages that `request` has to be given to have room for `num_tokens`."""
        lacking = -(-num_tokens // self.page_size) - len(request.pages)
        return lacking if lacking > 0 else 0

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Gives a request without pages room for `num_tokens`, pages with its first tokens' keys among it, if enough
        pages are free."""
        request.chain = [request.cache_salt]
        found = self._match(request)
        lacking = self.pages_for(num_tokens) - len(found)
        if lacking + self._cache.num_held(page for _, page in found) > self.num_free:
            return False
        self._count(request, queries=request.num_tokens if self._reads(request) else 0)
        self._adopt(request, found)  # first: what is allocated may be taken from what was found
        request.pages += self._cache.allocate(lacking)
        return True

    def adopt(self, request: Request) -> int:
        """Gives a request the pages that others have computed since in place of its own empty ones.

        Returns:
            How many of its first tokens need not be computed, as far as full pages of them go.
        """
        self._adopt(request, self._match(request))
        return (len(request.chain) - 1) * self.page_size

    def register(self, request: Request, num_tokens: int) -> None:
        """Puts the pages that the request's first `num_tokens` fill on record.

        Their keys need not be written yet, if they are by a launch ahead of any other that reads them, or by the same
        one: each layer writes a launch's keys before any of its queries attends.
        """
        if self._caches:
            begin, end = len(request.chain) - 1, num_tokens // self.page_size
            self._cache.register(request.chain, self._contents(request, begin, end), request.pages[begin:end])

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Gives a request room for `num_tokens` in all, if enough pages are free."""
        lacking = self.lacking(request, num_tokens)
        if lacking > self.num_free:
            return False
        if lacking:  # for one decode in `page_size`
            request.pages += self._cache.allocate(lacking)
        return True

    def free(self, request: Request) -> None:
        """Takes back all that a request has."""
        self._cache.free(request.pages)
        request.pages, request.chain = [], []

    def forget(self, request: Request) -> None:
        """Takes the request's pages off the record: what they hold is not to be read again."""
        self._cache.forget(request.pages)

    def clear(self) -> bool:
        """Takes all pages off the record; False, and nothing happens, while a request has some."""
        if self.num_free < self.num_pages:
            return False
        self._cache.clear()
        return True

    def reset(self, requests: list[Request]) -> None:
        """Makes all pages free, none on record; `requests` are those that may have some."""
        self._cache = PageCache(self.num_pages + 1)
        for request in requests:
            request.pages, request.chain = [], []

    def _reads(self, request: Request) -> bool:
        """Whether the request may skip tokens: not if it asks for what only computing them gives."""
        return self._caches and request.params.prompt_logprobs is None

    def _match(self, request: Request) -> list[Entry]:
        """Pages on record that follow the request's chain; never all of its tokens, as one must give logits."""
        if not self._reads(request):
            return []
        end = (request.num_tokens - 1) // self.page_size
        return self._cache.match(request.chain, self._contents(request, len(request.chain) - 1, end))

    def _adopt(self, request: Request, found: list[Entry]) -> None:
        if not found:
            return
        self._cache.take(found)
        begin = len(request.chain) - 1
        end = begin + len(found)
        own, request.pages[begin:end] = request.pages[begin:end], [page for _, page in found]
        request.chain += [id for id, _ in found]
        self._cache.free(own)
        self._count(request, hits=len(found) * self.page_size)

    def _count(self, request: Request, *, queries: int = 0, hits: int = 0) -> None:
        stats = self.prefix_cache_stats
        if request.num_preemptions or request.generated:
            stats.resumed_queries += queries
            stats.resumed_hits += hits
        else:
            stats.queries += queries
            stats.hits += hits
            request.num_cached_tokens = hits if queries else request.num_cached_tokens + hits

    def _contents(self, request: Request, begin: int, end: int) -> Iterator[bytes]:
        """The tokens of each of the request's pages from `begin` on."""
        tokens = request.tokens if begin < end else []
        width = self.page_size * array("i").itemsize
        for first in range(begin, end, _PAGES_AT_ONCE):
            stop = min(end, first + _PAGES_AT_ONCE)
            data = array("i", tokens[first * self.page_size : stop * self.page_size]).tobytes()
            yield from (data[place : place + width] for place in range(0, len(data), width))
