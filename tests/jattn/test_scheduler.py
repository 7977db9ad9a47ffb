"""The scheduler alone, driven by hand and by random arrivals: no device, no arrays."""

import random

import pytest

from jattn.page_allocator import PageAllocator
from jattn.serving.request import Request, RequestStatus, SamplingParams
from jattn.serving.scheduler import Scheduler


def make_scheduler(num_pages=9, page_size=4, max_num_seqs=4, prefill_tokens=8, prefill_seqs=2):
    allocator = PageAllocator(num_pages)
    scheduler = Scheduler(
        allocator,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        prefill_tokens=prefill_tokens,
        prefill_seqs=prefill_seqs,
    )
    return scheduler, allocator


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
        spans.append((chunk.start, chunk.stop, chunk.is_last))
    assert spans == [(0, 8, False), (8, 16, False), (16, 18, True)]


def test_prefill_packs_requests_in_order_of_arrival():
    scheduler, _ = make_scheduler()
    requests = [make_request(i, prompt_len=3, max_tokens=1) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    assert [chunk.request.number for chunk in scheduler.plan_prefill()] == [0, 1]  # prefill_seqs is 2
    assert [chunk.request.number for chunk in scheduler.plan_prefill()] == [2]


def test_admission_waits_for_pages_and_keeps_the_order():
    scheduler, allocator = make_scheduler(num_pages=5, prefill_tokens=64)
    for i, prompt_len in enumerate((7, 9, 2)):
        scheduler.add(make_request(i, prompt_len=prompt_len, max_tokens=1))
    chunks = scheduler.plan_prefill()
    assert [chunk.request.number for chunk in chunks] == [0]  # 1 needs three pages, and 2 must not overtake it
    assert allocator.num_free == 2


def test_check_refuses_what_the_pool_can_never_hold():
    scheduler, _ = make_scheduler(num_pages=5)
    with pytest.raises(ValueError, match=r"needs 5 pages of 4; the pool has 4"):
        scheduler.check(make_request(0, prompt_len=10, max_tokens=7))
    scheduler.check(make_request(0, prompt_len=10, max_tokens=6))


def test_preemption_takes_the_latest_arrival_and_keeps_its_tokens():
    scheduler, allocator = make_scheduler(num_pages=5, prefill_tokens=64)
    old, new = (make_request(i, prompt_len=7, max_tokens=8) for i in range(2))
    scheduler.add(old)
    scheduler.add(new)
    scheduler.plan_prefill()
    for request in (old, new):
        request.generated.append(100)
    assert allocator.num_free == 0
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
    scheduler, allocator = make_scheduler(max_num_seqs=1)
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
    assert allocator.num_free == allocator.num_pages
    assert not scheduler.has_work


def test_restart_lets_every_request_wait_again_in_order():
    scheduler, _ = make_scheduler(max_num_seqs=2)
    requests = [make_request(i, prompt_len=3, max_tokens=2) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    scheduler.plan_prefill()
    scheduler.plan_decode()
    scheduler.finish(requests[1], "stop")
    allocator = PageAllocator(9)
    left = [requests[0], requests[2], requests[3]]
    assert scheduler.restart(allocator) == left
    assert all((r.status, r.row, r.pages, r.num_computed) == (RequestStatus.WAITING, None, [], 0) for r in left)
    assert [chunk.request for chunk in scheduler.plan_prefill()] == left[:2]
    assert allocator.num_free < allocator.num_pages


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_keeps_the_invariants(seed):
    rng = random.Random(seed)
    scheduler, allocator = make_scheduler(
        num_pages=rng.randint(6, 20), page_size=rng.choice([1, 4]), max_num_seqs=rng.randint(1, 5), prefill_tokens=8
    )
    live, done, started, number = [], [], [], 0
    for _ in range(600):
        if rng.random() < 0.2:
            request = make_request(number, rng.randint(1, 12), rng.randint(1, 8))
            try:
                scheduler.check(request)
            except ValueError:
                continue
            scheduler.add(request)
            live.append(request)
            number += 1
        planned = scheduler.plan_decode()
        yields = planned + [chunk.request for chunk in scheduler.plan_prefill() if chunk.is_last]
        started += [request.number for request in yields if request.number not in started]
        for request in yields:
            request.generated.append(0)
            if len(request.tokens) == request.limit or rng.random() < 0.05:
                scheduler.finish(request, "length")
        for request in live:
            if not request.finished and rng.random() < 0.01:
                scheduler.finish(request, "abort")
        done += [request for request in live if request.finished]
        live = [request for request in live if not request.finished]
        owned = [page for request in live for page in request.pages]
        assert len(owned) == len(set(owned))
        assert len(owned) + allocator.num_free == allocator.num_pages
        assert all(len(request.pages) * scheduler._page_size >= request.num_computed for request in live)
        rows = [request.row for request in live if request.row is not None]
        assert len(rows) == len(set(rows))
    assert started == sorted(started)
    assert len(done) > 20
