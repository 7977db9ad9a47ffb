"""The host's free list of KV pages, with reference counts so that sequences can share a prefix."""

from collections import Counter, deque
from collections.abc import Sequence


class OutOfPages(Exception):
    """Fewer pages are free than were asked for."""


class PageAllocator:
    """Hands out the pages of a pool.

    Page 0 belongs to nobody: padded table entries point to it, so it is never allocated. Of the free pages, the one
    freed longest ago is taken first.

    Args:
        num_pages: Pages in the pool, page 0 included.

    Raises:
        ValueError: No page would be left to allocate.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"`num_pages` must be at least 2, as page 0 is reserved. Got {num_pages=}.")
        self._free = deque(range(1, num_pages))
        self._ref_counts = [0] * num_pages

    @property
    def num_pages(self) -> int:
        """Pages that can be allocated in total, so without page 0."""
        return len(self._ref_counts) - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Takes `n` pages, each with one owner.

        Raises:
            OutOfPages: Fewer than `n` are free; none was taken.
        """
        if n < 0:
            raise ValueError(f"`n` must not be negative. Got {n=}.")
        if n > len(self._free):
            raise OutOfPages(f"{n} pages were asked for, {self.num_free} of {self.num_pages} are free.")
        pages = [self._free.popleft() for _ in range(n)]
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds one owner to each page.

        Raises:
            ValueError: A page is free or out of range; no page was shared.
        """
        for page in pages:
            self._check_range(page)
            if self._ref_counts[page] == 0:
                raise ValueError(f"`pages` must be allocated before they are shared. Got the free page {page}.")
        for page in pages:
            self._ref_counts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Takes one owner from each page; a page without one is free again.

        Raises:
            ValueError: A page has fewer owners than that, or is out of range; nothing changed.
        """
        for page, times in Counter(pages).items():
            self._check_range(page)
            if times > self._ref_counts[page]:
                raise ValueError(
                    f"`pages` must not be freed more often than they are owned. "
                    f"Got page {page} {times} times, owned {self._ref_counts[page]} times."
                )
        for page in pages:
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._give_back(page)

    def _give_back(self, page: int) -> None:
        self._free.append(page)

    def _check_range(self, page: int) -> None:
        if not 1 <= page <= self.num_pages:
            raise ValueError(f"`page` must lie in 1..{self.num_pages}. Got {page=}.")
