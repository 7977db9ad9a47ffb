"""The scheduler: which requests get pages and go into the next launches; host only, no arrays.

It plans with lengths that no stop token has shortened yet: a row that has ended on the device stays planned until the
host has read its last token, and writes nowhere meanwhile. Where tokens are drafted it plans with the greatest lengths
that the launches under way may give, until the host has read how many tokens they gave.
"""

from collections import deque
from collections.abc import Iterator

from jattn.serving.kv_cache import KVCacheManager
from jattn.serving.plan import Chunk
from jattn.serving.request import FinishReason, Request, RequestStatus


class Scheduler:
    """First come, first served: admission by free pages, preemption of the latest arrival by recompute.

    A step plans one token for every running request, and what is drafted after it; beside them chunks of prompts under
    a budget of tokens: however long a prompt is, a decode waits for one prefill launch at most. The budget goes to the
    earliest arrivals first, as in vLLM and SGLang; with `max_chunk_tokens` below it, what a long prompt leaves goes to
    those behind it.

    Args:
        kv_cache: Room in the pool; the scheduler alone asks for it and gives it back.
        max_num_seqs: Requests that hold a row at the same time.
        prefill_tokens, prefill_seqs: Bounds of one prefill launch.
        max_chunk_tokens: Bound of one request's part of it; None is `prefill_tokens`.
        num_draft_tokens: Tokens that each request's decode verifies beside its own. Their keys are written whether or
            not they are accepted, so that a request needs room for so many more.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        prefill_tokens: int,
        prefill_seqs: int,
        max_chunk_tokens: int | None = None,
        num_draft_tokens: int = 0,
    ):
        self._kv_cache = kv_cache
        self._prefill_tokens = prefill_tokens
        self._prefill_seqs = prefill_seqs
        self._max_chunk_tokens = max_chunk_tokens or prefill_tokens
        self._max_num_seqs = max_num_seqs
        self._num_draft_tokens = num_draft_tokens
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._waiting: deque[Request] = deque()
        self._admitted: list[Request] = []  # in order of arrival
        self.peak_pages = 0  # in use at once, in the latest step

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._admitted)

    def check(self, request: Request) -> None:
        """Says whether the request could be served.

        Raises:
            ValueError: The pool could not hold the request even if it were alone.
        """
        most = request.limit + self._num_draft_tokens
        needed = self._kv_cache.pages_for(most)
        if needed > self._kv_cache.num_pages:
            drafted = f", {self._num_draft_tokens} of them drafted," if self._num_draft_tokens else ""
            raise ValueError(
                f"The request may grow to {most} tokens{drafted} and needs {needed} pages of {self._kv_cache.page_size}"
                f"; the pool has {self._kv_cache.num_pages}. Lower `max_tokens` or make the pool larger."
            )

    def add(self, request: Request) -> None:
        """Queues a request that passed `check`.

        Raises:
            ValueError: It was queued before, or has ended.
        """
        if request.status is not RequestStatus.NEW:
            raise ValueError(f"`request` must be new: make another one. Got one that is {request.status.name}.")
        self._waiting.append(request)
        request.status = RequestStatus.WAITING

    def must_preempt(self) -> bool:
        """Takes back pages that no query to come sees, and says whether the next decode launch needs more than are
        free."""
        self._kv_cache.release((request, self._first_query(request)) for request in self._admitted)
        return not self._kv_cache.has_room((request, self._longest(request)) for request in self._decodable())

    def plan_decode(self) -> list[Request]:
        """The requests of the next decode launch, each with pages for its next tokens.

        A preempted request starts over with what `Request.generated` holds, so every launch must have been read
        when `must_preempt` says so.
        """
        self.peak_pages = 0
        planned = []
        for request in self._decodable():
            while request.status is RequestStatus.RUNNING and not self._kv_cache.grow(request, self._longest(request)):
                self._preempt(self._admitted[-1])
            if request.status is RequestStatus.RUNNING:
                planned.append(request)
        for request in planned:
            request.num_computed += 1
            request.num_unsure += self._num_draft_tokens
        self._note_peak()
        return planned

    def note_accepted(self, request: Request, num_accepted: int) -> None:
        """Tells how many of a decode launch's drafted tokens were accepted, once the launch is read."""
        request.num_computed += num_accepted
        request.num_unsure -= self._num_draft_tokens

    def plan_prefill(self, num_decodes: int = 0) -> list[Chunk]:
        """The parts of prompts that go into the next prefill launch, earliest arrivals first.

        Full pages of a part are on record at once: the launch follows, and may itself have another request's part that
        begins behind them.

        Args:
            num_decodes: Tokens of the launch that are decodes'; fewer than `prefill_tokens`.
        """
        chunks = []
        budget = self._prefill_tokens - num_decodes
        for request in self._prefilling():
            chunk = self._next_chunk(request, min(budget, self._max_chunk_tokens))
            if chunk is None:
                break
            self._kv_cache.register(request, chunk.stop)
            chunks.append(chunk)
            budget -= chunk.stop - chunk.start
            if not budget or len(chunks) == self._prefill_seqs:
                break
        self._note_peak()
        return chunks

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request at any stage; its pages and its row are free for the next launch.

        A launch still under way may write to them: it runs before the next one, which writes them anew.
        """
        request.finish_reason, request.status = reason, RequestStatus.FINISHED
        if request in self._admitted:
            if reason == "error":
                self._kv_cache.forget(request)
            else:
                self._register_generated(request)
            self._release(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def restart(self) -> list[Request]:
        """Lets all requests wait again, whatever a call that was cut short has left behind.

        Returns:
            The requests.
        """
        requests = [r for r in dict.fromkeys([*self._admitted, *self._waiting]) if not r.finished]
        for request in requests:
            request.status, request.row = RequestStatus.WAITING, None
            request.num_computed = request.num_unsure = 0
        self._kv_cache.reset(requests)
        self._free_rows = list(reversed(range(self._max_num_seqs)))
        self._waiting = deque(requests)  # before `_admitted` is emptied: this call may be cut short too
        self._admitted = []
        return requests

    def _decodable(self) -> list[Request]:
        return [r for r in self._admitted if r.status is RequestStatus.RUNNING and not r.at_limit]

    def _longest(self, request: Request) -> int:
        """Tokens that may have keys once the next decode has run, drafted ones included."""
        return min(request.num_computed + request.num_unsure + 1, request.limit) + self._num_draft_tokens

    def _first_query(self, request: Request) -> int:
        """Where the request's next launch reads keys first: a draft model's begins one token earlier."""
        return request.num_computed - (1 if self._num_draft_tokens else 0)

    def _room(self, request: Request, num_tokens: int) -> int:
        """Tokens to have room for where so many are computed of a prompt.

        With its last one there is one more: what it yields must have a place, or it is preempted at once.
        """
        if num_tokens < request.num_tokens:
            return num_tokens
        return min(num_tokens + 1, request.limit) + self._num_draft_tokens

    def _prefilling(self) -> Iterator[Request]:
        """Requests with tokens to compute, earliest arrivals first; one that waits is admitted when it is asked for."""
        for request in list(self._admitted):
            if request.status is RequestStatus.PREFILL:  # still: it may have lost its pages to those before it
                yield request
        while self._waiting and self._admit(self._waiting[0]):
            yield self._admitted[-1]

    def _admit(self, request: Request) -> bool:
        if not self._free_rows or not self._kv_cache.allocate(request, self._room(request, request.num_tokens)):
            return False
        request.row = self._free_rows.pop()
        request.status = RequestStatus.PREFILL
        self._admitted.append(request)  # before it leaves the queue: `restart` must find it in one of them
        self._waiting.popleft()
        return True

    def _next_chunk(self, request: Request, max_tokens: int) -> Chunk | None:
        """The next part of a prompt; None if a window's list has no pages for it, and no later prompt that holds some.

        Such a prompt has no launch under way that gives a token, so that it may be preempted at any time.
        """
        begin, total = request.num_computed, request.num_tokens
        start = max(begin, self._kv_cache.adopt(request))
        stop = min(total, start + max_tokens)
        while not self._kv_cache.grow(request, self._room(request, stop)):
            last = self._admitted[-1]
            if last is request or last.status is not RequestStatus.PREFILL:
                return None
            self._preempt(last)
        request.num_computed = stop
        if stop == total:
            request.status = RequestStatus.RUNNING
        return Chunk(request, begin, start, stop, is_last=stop == total)

    def _preempt(self, request: Request) -> None:
        self._waiting.appendleft(request)
        self._register_generated(request)
        self._release(request)
        request.num_computed = request.num_unsure = 0
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1

    def _register_generated(self, request: Request) -> None:
        """Puts the text so far on record, as far as its keys are sure to be written.

        The newest token's is not if its row has ended. Where tokens are drafted, the draft model's key of the one
        before it may be missing too: the next step would have made up for it (`DraftModel.propose`).
        """
        written = request.num_tokens - (2 if self._num_draft_tokens else 1)
        self._kv_cache.register(request, min(request.num_computed, max(0, written)))

    def _release(self, request: Request) -> None:
        assert request.row is not None
        self._admitted.remove(request)
        self._kv_cache.free(request)
        self._free_rows.append(request.row)
        request.row = None

    def _note_peak(self) -> None:
        self.peak_pages = max(self.peak_pages, self._kv_cache.num_pages - self._kv_cache.num_free)
