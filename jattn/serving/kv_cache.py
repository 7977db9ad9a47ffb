"""KVCacheManager: which pages of the pool are whose; the policy asks for room in tokens and sees no page."""

import dataclasses
from array import array
from collections.abc import Iterable, Iterator, Sequence

from jattn.page_cache import Entry, PageCache
from jattn.page_lists import WindowList
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
    """Gives requests room in the pool and takes it back; it alone changes `Request.page_lists` and `Request.chain`.

    A page may have several owners, and is free once the last of them has given it back. With the prefix cache, full
    pages stay on record under the tokens that they hold until they are needed, and requests that begin with these
    tokens, of the same `cache_salt`, share them.

    A request has pages in each of the pool's lists. The first one keeps those of all its tokens; from the others a page
    goes back once no query to come sees its keys. A prefix is found as far as the first list has all of its pages and
    the others those that the query behind it sees.

    Args:
        num_pages: Pages of the first list, the reserved page 0 included.
        page_size: Tokens a page.
        windows: The other lists.
        enable_prefix_caching: Whether pages are put on record.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        windows: Sequence[WindowList] = (),
        enable_prefix_caching: bool = False,
    ):
        self.page_size = page_size
        self.prefix_cache_stats = PrefixCacheStats()
        self._caches = enable_prefix_caching
        self._num_pages = (num_pages, *(window.num_pages for window in windows))
        self._spans = [window.span for window in windows]
        self._lists = [PageCache(number) for number in self._num_pages]

    @property
    def num_pages(self) -> int:
        """Pages that requests can have in total; of the first list."""
        return self._lists[0].num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns; of the first list."""
        return self._lists[0].num_free

    @property
    def usage(self) -> float:
        """Share of the pages that somebody owns, of the list where it is largest."""
        return max(1 - pages.num_free / pages.num_pages for pages in self._lists)

    @property
    def is_free(self) -> bool:
        """Whether nobody owns a page of any list."""
        return all(pages.num_free == pages.num_pages for pages in self._lists)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def has_room(self, wanted: Iterable[tuple[Request, int]]) -> bool:
        """Whether `grow` could give all these requests, whose prompts are computed, room for so many tokens each."""
        page_size, lacking = self.page_size, 0
        for request, num_tokens in wanted:
            count = -(-num_tokens // page_size) - len(request.page_lists[-1])  # as many as in any other list
            if count > 0:
                lacking += count
        return all(lacking <= pages.num_free for pages in self._lists)

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Gives a request without pages room for `num_tokens` in the first list, if enough pages are free.

        Pages with its first tokens' keys are among it; of the other lists it is given these alone.
        """
        request.chain = [request.cache_salt]
        request.page_lists = [[] for _ in self._lists]
        found = self._match(request)
        lacking = self.pages_for(num_tokens) - len(found)
        if lacking + self._lists[0].num_held(page for _, page in found) > self.num_free:
            request.page_lists = []
            return False
        self._count(request, queries=request.num_tokens if self._reads(request) else 0)
        self._adopt(request, found)  # first: what is allocated may be taken from what was found
        request.pages.extend(self._lists[0].allocate(lacking))
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
            self._lists[0].register(request.chain, self._contents(request, begin, end), request.pages[begin:end])
            for pages, own in zip(self._lists[1:], request.page_lists[1:], strict=True):
                pages.record(request.chain[1 + begin : 1 + end], own[begin:end])

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Gives a request room for `num_tokens` in all, if enough pages are free in each list."""
        end = -(-num_tokens // self.page_size)
        if end <= len(request.page_lists[-1]):  # but for one decode in `page_size`; no other list has fewer
            return True
        lacking = [end - len(own) for own in request.page_lists]
        if any(count > pages.num_free for count, pages in zip(lacking, self._lists, strict=True)):
            return False
        for count, own, pages in zip(lacking, request.page_lists, self._lists, strict=True):
            own += pages.allocate(max(0, count))
        return True

    def release(self, first_queries: Iterable[tuple[Request, int]]) -> None:
        """Takes back what requests' queries to come, the first one at a position, do not see.

        Launches under way may read it: they run before the next one, which writes it anew.
        """
        if not self._spans:
            return
        for request, position in first_queries:
            for number, span in enumerate(self._spans, 1):
                own, end = request.page_lists[number], span.first_page(position, self.page_size)
                if end > 0 and own[min(end, len(own)) - 1]:  # for one decode in `page_size`
                    _give_back(own, end, self._lists[number])

    def free(self, request: Request) -> None:
        """Takes back all that a request has."""
        for own, pages in zip(request.page_lists, self._lists, strict=True):
            pages.free([page for page in own if page])
        request.page_lists, request.chain = [], []

    def forget(self, request: Request) -> None:
        """Takes the request's pages off the record: what they hold is not to be read again."""
        self._lists[0].forget(request.pages)
        for pages in self._lists[1:]:
            pages.drop(request.chain[1:])

    def clear(self) -> bool:
        """Takes all pages off the record; False, and nothing happens, while a request has some."""
        if not self.is_free:
            return False
        for pages in self._lists:
            pages.clear()
        return True

    def reset(self, requests: list[Request]) -> None:
        """Makes all pages free, none on record; `requests` are those that may have some."""
        self._lists = [PageCache(number) for number in self._num_pages]
        for request in requests:
            request.page_lists, request.chain = [], []

    def _reads(self, request: Request) -> bool:
        """Whether the request may skip tokens: not if it asks for what only computing them gives."""
        return self._caches and request.params.prompt_logprobs is None

    def _match(self, request: Request) -> list[Entry]:
        """Pages on record that follow the request's chain, as far as every list has what is needed there; never all of
        its tokens, as one must give logits."""
        if not self._reads(request):
            return []
        begin, end = len(request.chain) - 1, (request.num_tokens - 1) // self.page_size
        found = self._lists[0].match(request.chain, self._contents(request, begin, end))
        while found and self._spans and (gap := self._last_gap(begin, found)) is not None:
            del found[gap:]  # whatever ends behind the gap needs it
        return found

    def _last_gap(self, begin: int, found: list[Entry]) -> int | None:
        """The last of the pages found that the query behind them sees and another list has not; None if there is none.

        Args:
            begin: Which of the request's pages the first one is. Of those before it the request has what it sees.
        """
        position = (begin + len(found)) * self.page_size
        gaps = []
        for span, pages in zip(self._spans, self._lists[1:], strict=True):
            first = max(0, span.first_page(position, self.page_size) - begin)
            missing = (i for i in reversed(range(first, len(found))) if pages.find(found[i].id) is None)
            gaps.append(next(missing, -1))
        gap = max(gaps)
        return None if gap < 0 else gap

    def _adopt(self, request: Request, found: list[Entry]) -> None:
        if not found:
            return
        begin = len(request.chain) - 1
        end = begin + len(found)
        for span, own, pages in zip(self._spans, request.page_lists[1:], self._lists[1:], strict=True):
            first = max(0, span.first_page(end * self.page_size, self.page_size))
            _give_back(own, first, pages)
            entries = [pages.find(id) for id, _ in found[max(0, first - begin) :]]
            entries = [entry for entry in entries if entry is not None]
            own += [0] * (end - len(entries) - len(own))
            _replace(own, end - len(entries), entries, pages)
        _replace(request.pages, begin, found, self._lists[0])
        request.chain += [id for id, _ in found]
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


def _give_back(own: list[int], end: int, pages: PageCache) -> None:
    """Gives a request's first pages back to their list, but for those that went before."""
    end = begin = min(end, len(own))
    while begin > 0 and own[begin - 1]:
        begin -= 1
    if begin < end:
        pages.free(own[begin:end])
        own[begin:end] = [0] * (end - begin)


def _replace(own: list[int], begin: int, found: Sequence[Entry], pages: PageCache) -> None:
    """Puts pages on record in the place of a request's own from one on."""
    pages.take(found)
    end = begin + len(found)
    before, own[begin:end] = own[begin:end], [page for _, page in found]
    pages.free([page for page in before if page])
