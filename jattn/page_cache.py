"""Pages that keep what they hold once nobody owns them, so that a later sequence with the same beginning shares them.

A page is found by its content and by the page before it, exactly: no hash of tokens stands for them. A sequence's
*chain* is a list: its root, which tells apart those that may not share, and the ids of its first pages on record. Ids
are never used twice, so what comes after an entry that is gone cannot be found any more, and is never found wrongly.
Other page lists record their pages under the ids that the first one's have for the same content.
"""

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from jattn.page_allocator import PageAllocator


class Entry(NamedTuple):
    """A page on record.

    Attributes:
        id: Stands for the page's content and all that came before it.
        page: Where it is.
    """

    id: Hashable
    page: int


class PageCache(PageAllocator):
    """A `PageAllocator` that finds pages by what they hold.

    Pages that nobody owns and that are not on record are allocated first; then those on record, the one freed longest
    ago first, each taken off the record.

    Args:
        num_pages: Pages in the pool, page 0 included.

    Raises:
        ValueError: No page would be left to allocate.
    """

    def __init__(self, num_pages: int):
        super().__init__(num_pages)
        self._held: OrderedDict[int, None] = OrderedDict()  # on record and without an owner, freed longest ago first
        self._entries: dict[Hashable, Entry] = {}
        self._key_of: dict[int, Hashable] = {}
        self._ids = itertools.count()

    @property
    def num_free(self) -> int:
        """Pages that nobody owns, those on record included."""
        return len(self._free) + len(self._held)

    @property
    def num_entries(self) -> int:
        """Pages on record."""
        return len(self._entries)

    def num_held(self, pages: Iterable[int]) -> int:
        """How many of these pages on record nobody owns."""
        return sum(page in self._held for page in pages)

    def allocate(self, n: int) -> list[int]:
        while len(self._free) < n <= self.num_free:
            page, _ = self._held.popitem(last=False)
            del self._entries[self._key_of.pop(page)]
            self._free.append(page)
        return super().allocate(n)

    def free(self, pages: Sequence[int]) -> None:
        super().free(pages[::-1])  # a sequence's end is found least often, and not without its beginning

    def match(self, chain: Sequence[Hashable], contents: Iterable[bytes]) -> list[Entry]:
        """The longest run of pages on record that follows the chain.

        Args:
            contents: What the pages behind the chain are to hold, in order.
        """
        found, parent = [], chain[-1]
        for content in contents:
            entry = self._entries.get((parent, content))
            if entry is None:
                break
            found.append(entry)
            parent = entry.id
        return found

    def find(self, id: Hashable) -> Entry | None:
        """The page that `record` was given for an id, while it is on record."""
        return self._entries.get(id)

    def take(self, entries: Sequence[Entry]) -> None:
        """Adds one owner to the page of each entry that `match` has just found."""
        for _, page in entries:
            self._held.pop(page, None)
            self._ref_counts[page] += 1

    def register(self, chain: list[Hashable], contents: Iterable[bytes], pages: Sequence[int]) -> None:
        """Puts pages on record and their ids on the chain.

        Where a page of this content stands on record already, its id goes on the chain; the given page stays off.

        Args:
            chain: Of the sequence up to these pages.
            contents: What the pages hold, or will before anybody who finds them reads them.
            pages: Owned by the caller, and not on record.
        """
        for content, page in zip(contents, pages, strict=True):
            key = chain[-1], content
            if key not in self._entries:
                self._entries[key] = Entry(next(self._ids), page)
                self._key_of[page] = key
            chain.append(self._entries[key].id)

    def record(self, ids: Iterable[Hashable], pages: Iterable[int]) -> None:
        """Puts pages on record under ids of another list, but for ids that have a page, and for page 0.

        Args:
            pages: Owned by the caller, and not on record under other ids.
        """
        for id, page in zip(ids, pages, strict=True):
            if page and id not in self._entries:
                self._entries[id] = Entry(id, page)
                self._key_of[page] = id

    def drop(self, ids: Iterable[Hashable]) -> None:
        """Takes the pages of these ids off the record, whoever has them."""
        for id in ids:
            if (entry := self._entries.pop(id, None)) is not None:
                del self._key_of[entry.page]
                if entry.page in self._held:
                    del self._held[entry.page]
                    self._free.append(entry.page)

    def forget(self, pages: Iterable[int]) -> None:
        """Takes pages that have owners off the record; they stay their owners'."""
        for page in pages:
            if page in self._key_of:
                del self._entries[self._key_of.pop(page)]

    def clear(self) -> None:
        """Takes all pages off the record."""
        self._entries.clear()
        self._key_of.clear()
        self._free.extend(self._held)
        self._held.clear()

    def _give_back(self, page: int) -> None:
        if page in self._key_of:
            self._held[page] = None
        else:
            super()._give_back(page)
