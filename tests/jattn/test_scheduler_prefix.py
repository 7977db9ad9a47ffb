"""The scheduler and the prefix cache: on record is what launches write before anything reads it, and no more."""

import pytest

from jattn.serving.kv_cache import KVCacheManager
from jattn.serving.request import Request, RequestStatus, SamplingParams
from jattn.serving.scheduler import Scheduler

PAGE = 4


def make_scheduler(num_pages=9, num_draft_tokens=0):
    kv_cache = KVCacheManager(num_pages, PAGE, enable_prefix_caching=True)
    sizes = {"max_num_seqs": 4, "prefill_tokens": 8, "prefill_seqs": 2}
    return Scheduler(kv_cache, **sizes, num_draft_tokens=num_draft_tokens), kv_cache


def make_request(number, prompt, max_tokens=8):
    return Request(
        number=number,
        prompt=list(prompt),
        params=SamplingParams(max_tokens=max_tokens),
        limit=len(prompt) + max_tokens,
        stop_ids=frozenset(),
    )


def on_record(kv_cache, tokens):
    """How many of a text's first tokens are on record."""
    request = make_request(99, tokens)
    contents = kv_cache._contents(request, 0, len(tokens) // PAGE)
    return PAGE * len(kv_cache._lists[0].match([None], contents))


def decode(scheduler, request, token):
    """A decode launch, read at once."""
    assert scheduler.plan_decode() == [request]
    request.generated.append(token)


def test_prompt_is_on_record_as_far_as_its_launches_go():
    scheduler, kv_cache = make_scheduler()
    prompt = range(18)
    scheduler.add(make_request(0, prompt))
    for launched in (8, 16, 16):
        scheduler.plan_prefill()
        assert on_record(kv_cache, prompt) == launched


def test_request_of_the_same_launch_begins_behind_what_the_launch_writes():
    scheduler, _ = make_scheduler()
    for number in range(2):
        scheduler.add(make_request(number, range(7)))
    chunks = scheduler.plan_prefill()
    assert [(chunk.start, chunk.stop) for chunk in chunks] == [(0, 7), (4, 5)]


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_ended_text_is_on_record_but_for_keys_that_may_be_missing(num_draft_tokens):
    """The newest token's; with a draft model the one's before it too."""
    for num_generated in range(1, 9):
        scheduler, kv_cache = make_scheduler(num_draft_tokens=num_draft_tokens)
        request = make_request(0, range(5), max_tokens=10)
        scheduler.add(request)
        scheduler.plan_prefill()
        request.generated.append(100)
        for token in range(101, 100 + num_generated):
            decode(scheduler, request, token)
            scheduler.note_accepted(request, 0)
        scheduler.finish(request, "stop")
        written = max(5, len(request.tokens) - (2 if num_draft_tokens else 1))
        assert on_record(kv_cache, request.tokens) == written // PAGE * PAGE


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_launch_that_is_not_read_puts_nothing_on_record(num_draft_tokens):
    """Its token is not known yet, and its drafts may be refused: what it writes is of a text that nobody has."""
    scheduler, kv_cache = make_scheduler(num_draft_tokens=num_draft_tokens)
    request = make_request(0, range(6), max_tokens=10)
    scheduler.add(request)
    scheduler.plan_prefill()
    request.generated += [100, 101]  # 8 tokens; of the last no key is sure
    assert scheduler.plan_decode() == [request]
    assert scheduler.plan_decode() == [request]
    scheduler.finish(request, "abort")
    assert on_record(kv_cache, request.tokens) == 4


def test_preempted_request_finds_what_it_has_generated():
    scheduler, kv_cache = make_scheduler(num_pages=7)  # 6 to have
    first, second = make_request(0, range(7), max_tokens=12), make_request(1, range(50, 51), max_tokens=12)
    for request in (first, second):
        scheduler.add(request)
    scheduler.plan_prefill()
    for request in (first, second):
        request.generated.append(100)
    while second.status is RequestStatus.RUNNING:
        for request in scheduler.plan_decode():
            request.generated.append(100 + len(request.generated))
    assert on_record(kv_cache, second.tokens) >= 8 > len(second.prompt)


def served(scheduler, number, prompt):
    """A request that has its prompt's launches behind it."""
    request = make_request(number, prompt)
    scheduler.add(request)
    while request.status is not RequestStatus.RUNNING:
        scheduler.plan_prefill()
    return request


def test_error_takes_the_prompt_off_the_record():
    scheduler, kv_cache = make_scheduler()
    request = served(scheduler, 0, range(10))
    assert on_record(kv_cache, request.prompt) == 8
    scheduler.finish(request, "error")
    assert on_record(kv_cache, request.prompt) == 0
    assert kv_cache.num_free == kv_cache.num_pages


def test_restart_takes_everything_off_the_record():
    """What the launches under way were to write may never be written."""
    scheduler, kv_cache = make_scheduler()
    ended, running = served(scheduler, 0, range(10)), served(scheduler, 1, range(50, 60))
    scheduler.finish(ended, "stop")
    scheduler.restart()
    assert [on_record(kv_cache, request.prompt) for request in (ended, running)] == [0, 0]
    assert kv_cache.num_free == kv_cache.num_pages
