"""The scheduler alone, driven by hand and by random arrivals: no device, no arrays."""

import random
from collections import Counter, deque

import pytest

from jattn.serving.kv_cache import KVCacheManager
from jattn.serving.request import Request, RequestStatus, SamplingParams
from jattn.serving.scheduler import Scheduler


def make_scheduler(
    num_pages=9,
    page_size=4,
    max_num_seqs=4,
    prefill_tokens=8,
    prefill_seqs=2,
    max_chunk_tokens=None,
    num_draft_tokens=0,
):
    kv_cache = KVCacheManager(num_pages, page_size)
    scheduler = Scheduler(
        kv_cache,
        max_num_seqs=max_num_seqs,
        prefill_tokens=prefill_tokens,
        prefill_seqs=prefill_seqs,
        max_chunk_tokens=max_chunk_tokens,
        num_draft_tokens=num_draft_tokens,
    )
    return scheduler, kv_cache


def make_request(number, prompt_len, max_tokens):
    return Request(
        number=number,
        prompt=list(range(prompt_len)),
        params=SamplingParams(max_tokens=max_tokens),
        limit=prompt_len + max_tokens,
        stop_ids=frozenset(),
    )


def test_prefill_is_cut_to_the_token_budget():
    scheduler, _ = make_scheduler()
    request = make_request(0, prompt_len=18, max_tokens=2)
    scheduler.add(request)
    spans = []
    while request.status is not RequestStatus.RUNNING:
        (chunk,) = scheduler.plan_prefill()
        spans.append((chunk.start, chunk.stop, chunk.is_first, chunk.is_last))
    assert spans == [(0, 8, True, False), (8, 16, False, False), (16, 18, False, True)]


def test_prefill_packs_requests_in_order_of_arrival():
    scheduler, _ = make_scheduler()
    requests = [make_request(i, prompt_len=3, max_tokens=1) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    assert [chunk.request.number for chunk in scheduler.plan_prefill()] == [0, 1]  # prefill_seqs is 2
    assert [chunk.request.number for chunk in scheduler.plan_prefill()] == [2]


def test_admission_waits_for_pages_and_keeps_the_order():
    scheduler, kv_cache = make_scheduler(num_pages=5, prefill_tokens=64)
    for i, prompt_len in enumerate((7, 9, 2)):
        scheduler.add(make_request(i, prompt_len=prompt_len, max_tokens=1))
    chunks = scheduler.plan_prefill()
    assert [chunk.request.number for chunk in chunks] == [0]  # 1 needs three pages, and 2 must not overtake it
    assert kv_cache.num_free == 2


def test_check_refuses_what_the_pool_can_never_hold():
    scheduler, _ = make_scheduler(num_pages=5)
    with pytest.raises(ValueError, match=r"needs 5 pages of 4; the pool has 4"):
        scheduler.check(make_request(0, prompt_len=10, max_tokens=7))
    scheduler.check(make_request(0, prompt_len=10, max_tokens=6))


def test_check_counts_the_drafted_tokens_past_the_limit():
    scheduler, _ = make_scheduler(num_pages=5, num_draft_tokens=3)
    with pytest.raises(
        ValueError, match=r"grow to 17 tokens, 3 of them drafted, and needs 5 pages of 4; the pool has 4"
    ):
        scheduler.check(make_request(0, prompt_len=10, max_tokens=4))
    scheduler.check(make_request(0, prompt_len=10, max_tokens=3))


def test_pages_are_reserved_for_all_that_launches_under_way_may_write():
    scheduler, kv_cache = make_scheduler(num_pages=30, prefill_tokens=64, num_draft_tokens=3)
    request = make_request(0, prompt_len=6, max_tokens=40)
    scheduler.add(request)
    scheduler.plan_prefill()
    pages = []
    for _ in range(3):  # 6 keys, and each launch may give 4 tokens more
        scheduler.plan_decode()
        pages.append(len(request.pages))
    assert pages == [3, 4, 5]
    request.generated += [1, 1]  # by the prefill, and by a launch that accepts nothing
    scheduler.note_accepted(request, 0)
    scheduler.plan_decode()
    assert len(request.pages) == 5  # where all accepted, it would be 6
    for _ in range(100):
        scheduler.plan_decode()
    assert len(request.pages) == kv_cache.pages_for(request.limit + 3)


def test_preemption_takes_the_latest_arrival_and_keeps_its_tokens():
    scheduler, kv_cache = make_scheduler(num_pages=5, prefill_tokens=64)
    old, new = (make_request(i, prompt_len=7, max_tokens=8) for i in range(2))
    scheduler.add(old)
    scheduler.add(new)
    scheduler.plan_prefill()
    for request in (old, new):
        request.generated.append(100)
    assert kv_cache.num_free == 0
    assert scheduler.plan_decode() == [old, new]  # fills both second pages
    for request in (old, new):
        request.generated.append(101)
    assert scheduler.must_preempt()
    assert scheduler.plan_decode() == [old]
    assert new.status is RequestStatus.WAITING
    assert new.pages == []
    assert new.tokens == [*range(7), 100, 101]
    assert new.num_preemptions == 1


def test_finish_at_every_stage_frees_pages_and_row():
    scheduler, kv_cache = make_scheduler(max_num_seqs=1)
    waiting, prefilling, running = (make_request(i, prompt_len=12, max_tokens=4) for i in (2, 1, 0))
    scheduler.add(running)
    scheduler.plan_prefill()
    scheduler.plan_prefill()
    assert running.status is RequestStatus.RUNNING
    scheduler.finish(running, "stop")
    scheduler.add(prefilling)
    scheduler.plan_prefill()
    scheduler.add(waiting)
    scheduler.finish(waiting, "abort")
    scheduler.finish(prefilling, "abort")
    assert kv_cache.num_free == kv_cache.num_pages
    assert not scheduler.has_work


def test_restart_lets_every_request_wait_again_in_order():
    scheduler, kv_cache = make_scheduler(max_num_seqs=2)
    requests = [make_request(i, prompt_len=3, max_tokens=2) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    scheduler.plan_prefill()
    scheduler.plan_decode()
    scheduler.finish(requests[1], "stop")
    left = [requests[0], requests[2], requests[3]]
    assert scheduler.restart() == left
    assert all((r.status, r.row, r.pages, r.num_computed) == (RequestStatus.WAITING, None, [], 0) for r in left)
    assert [chunk.request for chunk in scheduler.plan_prefill()] == left[:2]
    assert kv_cache.num_free < kv_cache.num_pages


@pytest.mark.parametrize("status", list(RequestStatus)[1:])
def test_request_is_queued_once_only(status):
    scheduler, _ = make_scheduler()
    request = make_request(0, prompt_len=3, max_tokens=2)
    request.status = status
    with pytest.raises(ValueError, match=rf"`request` must be new: .* Got one that is {status.name}"):
        scheduler.add(request)
    assert not scheduler.has_work


def test_chunks_are_cut_to_their_own_bound():
    scheduler, _ = make_scheduler(prefill_tokens=8, max_chunk_tokens=5)
    requests = [make_request(i, prompt_len=prompt_len, max_tokens=1) for i, prompt_len in enumerate((11, 6))]
    for request in requests:
        scheduler.add(request)
    spans = [[(chunk.request.number, chunk.start, chunk.stop) for chunk in scheduler.plan_prefill()] for _ in range(3)]
    assert spans == [[(0, 0, 5), (1, 0, 3)], [(0, 5, 10), (1, 3, 6)], [(0, 10, 11)]]


class Traffic:
    """Requests that come, end and are aborted at random, and the engine's loop: it reads one step behind.

    Args:
        seed: Of the sizes and of all that happens.
        num_draft_tokens: That each decode verifies.
    """

    def __init__(self, seed, num_draft_tokens):
        self.rng = rng = random.Random(seed)
        self.num_rows, self.page_size = rng.randint(1, 5), rng.choice([1, 2, 4])
        self.prefill_tokens = rng.randint(1, 12)
        self.scheduler, self.kv_cache = make_scheduler(
            num_pages=rng.randint(4, 20),
            page_size=self.page_size,
            max_num_seqs=self.num_rows,
            prefill_tokens=self.prefill_tokens,
            prefill_seqs=rng.randint(1, 3),
            max_chunk_tokens=rng.choice([None, 2]),
            num_draft_tokens=num_draft_tokens,
        )
        self.num_draft_tokens = num_draft_tokens
        self.requests, self.live, self.started = [], [], []
        self.in_flight = deque()
        self.aborted = Counter()

    def arrive(self):
        request = make_request(len(self.requests), self.rng.randint(1, 15), self.rng.randint(1, 12))
        try:
            self.scheduler.check(request)
        except ValueError:
            return
        self.scheduler.add(request)
        self.requests.append(request)
        self.live.append(request)

    def abort(self):
        request = self.rng.choice(self.live)
        self.aborted["PREEMPTED" if request.num_preemptions else request.status.name] += 1
        self.finish(request, "abort")

    def finish(self, request, reason):
        owned, free = len(request.pages), self.kv_cache.num_free
        self.scheduler.finish(request, reason)
        assert self.kv_cache.num_free == free + owned
        assert (request.pages, request.row, request.finish_reason) == ([], None, reason)

    def step(self):
        if self.scheduler.must_preempt():
            self.read(0)
        before = len(self.in_flight)
        if planned := self.scheduler.plan_decode():
            rooms = [len(request.pages) * self.page_size for request in planned]
            self.in_flight.append(list(zip(planned, rooms, strict=True)))
        num_mixed = len(planned) if 2 * len(planned) <= self.prefill_tokens else 0
        if chunks := self.scheduler.plan_prefill(num_mixed):
            assert sum(chunk.stop - chunk.start for chunk in chunks) <= self.prefill_tokens - num_mixed
            self.started += [chunk.request.number for chunk in chunks if chunk.request.number not in self.started]
            self.in_flight.append([(chunk.request, None) for chunk in chunks if chunk.is_last])
        self.read(len(self.in_flight) - before)

    def read(self, keep):
        while len(self.in_flight) > keep:
            for request, room in self.in_flight.popleft():
                if request.finished:
                    continue
                given = 1
                if room is not None:  # a decode: it wrote the keys of the newest token and of all that were drafted
                    assert request.num_tokens + self.num_draft_tokens <= room
                    given = self.rng.randint(1, min(1 + self.num_draft_tokens, request.limit - request.num_tokens))
                    self.scheduler.note_accepted(request, given - 1)
                request.generated += [0] * given
                if request.num_tokens == request.limit:
                    self.finish(request, "length")
                elif self.rng.random() < 0.05:
                    self.finish(request, self.rng.choice(["stop", "error"]))
        self.live = [request for request in self.live if not request.finished]

    def check(self):
        self.live = [request for request in self.live if not request.finished]
        owned = [page for request in self.live for page in request.pages]
        assert sorted(set(owned)) == sorted(owned)
        assert len(set(owned)) == len(owned)
        assert len(owned) + self.kv_cache.num_free == self.kv_cache.num_pages
        rows = [request.row for request in self.live if request.row is not None]
        assert len(set(rows)) == len(rows)
        assert set(rows) <= set(range(self.num_rows))
        for request in self.live:
            assert request.num_tokens <= request.limit
            assert request.num_computed <= len(request.pages) * self.page_size
        # Order: who came earlier is served earlier, and who holds pages came before all who wait.
        assert self.started == sorted(self.started)
        waits = [request.status is RequestStatus.WAITING for request in self.live]
        assert waits == sorted(waits)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_random_traffic_of_10000_steps_keeps_the_invariants(num_draft_tokens):
    aborted = Counter()
    for seed in range(25):
        traffic = Traffic(seed, num_draft_tokens)
        for _ in range(400):
            if traffic.rng.random() < 0.3 and len(traffic.live) < 20:
                traffic.arrive()
            traffic.step()
            if traffic.live and traffic.rng.random() < 0.1:
                traffic.abort()
            traffic.check()
        steps = 0
        while traffic.scheduler.has_work:
            traffic.step()
            traffic.check()
            steps += 1
            assert steps < 1000, f"stuck: {seed=}"
        assert traffic.kv_cache.num_free == traffic.kv_cache.num_pages
        assert all(request.finished for request in traffic.requests)
        aborted += traffic.aborted
    assert min(aborted[stage] for stage in ("WAITING", "PREFILL", "RUNNING", "PREEMPTED")) > 10
