"""The free list never loses a page, never gives one out twice, and changes nothing when it refuses."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jattn.page_allocator import OutOfPages, PageAllocator


class AllocatorMachine(RuleBasedStateMachine):
    """Drives an allocator beside a plain model: one list of pages per owner."""

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(12)
        self.owners: list[list[int]] = []

    @property
    def counts(self):
        return Counter(page for pages in self.owners for page in pages)

    @rule(n=st.integers(0, 14))
    def allocate(self, n):
        owned, free = set(self.counts), self.allocator.num_free
        if n > free:
            with pytest.raises(OutOfPages):
                self.allocator.allocate(n)
            assert self.allocator.num_free == free
        else:
            pages = self.allocator.allocate(n)
            assert len(set(pages)) == n
            assert not owned & set(pages)
            self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.sampled_from(self.owners))
        prefix = pages[: data.draw(st.integers(0, len(pages)))]
        self.allocator.share(prefix)
        self.owners.append(prefix)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free(self, data):
        self.allocator.free(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @rule(data=st.data())
    def free_refused(self, data):
        counts = self.counts
        page = data.draw(st.integers(1, self.allocator.num_pages))
        with pytest.raises(ValueError, match="freed more often"):
            self.allocator.free([*counts, *[page] * (counts[page] + 1)])

    @invariant()
    def free_and_owned_are_all(self):
        counts = self.counts
        assert self.allocator.num_free + len(counts) == self.allocator.num_pages == 11


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_allocator_gives_every_page_but_0():
    allocator = PageAllocator(5)
    assert sorted(allocator.allocate(4)) == [1, 2, 3, 4]
    with pytest.raises(OutOfPages, match="1 pages were asked for, 0 of 4 are free"):
        allocator.allocate(1)


def test_allocator_reuses_the_page_freed_longest_ago():
    allocator = PageAllocator(4)
    first, second, _ = allocator.allocate(3)
    allocator.free([second])
    allocator.free([first])
    assert allocator.allocate(2) == [second, first]


def test_allocator_keeps_a_shared_page_until_its_last_owner_leaves():
    allocator = PageAllocator(3)
    pages = allocator.allocate(1)
    allocator.share(pages)
    allocator.free(pages)
    assert allocator.num_free == 1
    allocator.free(pages)
    assert allocator.num_free == 2


def test_allocator_share_refusal_changes_nothing():
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1)
    with pytest.raises(ValueError, match="allocated before they are shared"):
        allocator.share([page, 3 - page])
    allocator.free([page])
    assert allocator.num_free == 2


@pytest.mark.parametrize("page", [-1, 0, 4])
def test_allocator_refuses_a_page_out_of_range(page):
    allocator = PageAllocator(4)
    for call in (allocator.free, allocator.share):
        with pytest.raises(ValueError, match=r"must lie in 1\.\.3"):
            call([page])


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_allocator_refuses_a_pool_without_pages(num_pages):
    with pytest.raises(ValueError, match="at least 2"):
        PageAllocator(num_pages)


def test_allocator_refuses_a_negative_count():
    with pytest.raises(ValueError, match="must not be negative"):
        PageAllocator(3).allocate(-1)
