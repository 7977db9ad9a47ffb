"""KVCacheManager: which pages of the pool are whose; the policy asks for room in tokens and sees no page."""

from jattn.page_allocator import PageAllocator
from jattn.serving.request import Request


class KVCacheManager:
    """Gives requests room in the pool and takes it back; it alone changes `Request.pages`.

    A page may have several owners, and is free once the last of them has given it back.

    Args:
        num_pages: Pages of the pool, the reserved page 0 included.
        page_size: Tokens a page.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self._allocator = PageAllocator(num_pages)

    @property
    def num_pages(self) -> int:
        """Pages that requests can have in total."""
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return self._allocator.num_free

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def lacking(self, request: Request, num_tokens: int) -> int:
        """Pages that `request` has to be given to have room for `num_tokens`."""
        lacking = -(-num_tokens // self.page_size) - len(request.pages)
        return lacking if lacking > 0 else 0

    def allocate(self, request: Request, num_tokens: int) -> int | None:
        """Gives a request without pages room for `num_tokens`.

        Returns:
            How many of its first tokens have their keys in the pool already; None, and no page is given, if too few are
            free.
        """
        cached = self.cached_pages(request)
        lacking = self.pages_for(num_tokens) - len(cached)
        if lacking > self.num_free:
            return None
        self._allocator.share(cached)
        request.pages = cached + self._allocator.allocate(lacking)
        return len(cached) * self.page_size

    def cached_pages(self, request: Request) -> list[int]:
        """Full pages that hold the keys of the request's first tokens, but never of all its tokens.

        None so far: nothing records which tokens a page holds.
        """
        return []

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Gives a request room for `num_tokens` in all, if enough pages are free."""
        lacking = self.lacking(request, num_tokens)
        if lacking > self.num_free:
            return False
        if lacking:  # for one decode in `page_size`
            request.pages += self._allocator.allocate(lacking)
        return True

    def free(self, request: Request) -> None:
        """Takes back all that a request has."""
        self._allocator.free(request.pages)
        request.pages = []

    def reset(self, requests: list[Request]) -> None:
        """Makes all pages free; `requests` are those that may have some."""
        self._allocator = PageAllocator(self.num_pages + 1)
        for request in requests:
            request.pages = []
