"""The engine: the policy of the serving loop; it plans on the host, and reads one launch behind the device."""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

from jattn.model import CausalLM
from jattn.serving.admission import Admission
from jattn.serving.config import EngineConfig
from jattn.serving.executor.executor import Executor
from jattn.serving.executor.launch import Given
from jattn.serving.kv_cache import KVCacheManager
from jattn.serving.plan import Plan
from jattn.serving.request import FinishReason, Request, SamplingParams
from jattn.serving.resolved_config import resolved
from jattn.serving.scheduler import Scheduler
from jattn.serving.steps.draft_model import DraftModel
from jattn.serving.steps.logprobs import Logprob
from jattn.serving.structured.grammar import Grammar


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """A token that the host has just read, and whether it was the request's last; None where the request ended instead.

    Attributes:
        logprobs: Of the token and the likeliest ones, by token id; None if not asked for.
    """

    request: Request
    token: int | None
    finish_reason: FinishReason | None
    logprobs: dict[int, Logprob] | None = None


class Engine:
    """Serves requests with one model: continuous batching, chunked prefill, prefix cache, preemption by recompute.

    For one thread at a time. A call that raises, even by Ctrl-C, loses no request: the next one starts them over.

    Args:
        model: The model; its weights stay on the device.
        config: What was asked for; what it leaves open is filled in.
        draft_model: The one that a `DraftModel` drafts with; else None.
        eos_token_ids: Tokens that end any request that does not ignore them.

    Attributes:
        vocab_size: Tokens that the model gives logits for.

    Raises:
        ValueError: A size cannot be served, or the pool does not fit the memory.
    """

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        *,
        draft_model: CausalLM | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ):
        if (draft_model is not None) != isinstance(config.speculative, DraftModel):
            raise ValueError(
                "`draft_model` must be given if `speculative` is a DraftModel, and only then. "
                f"Got draft_model={type(draft_model).__name__}, speculative={config.speculative!r}."
            )
        sizes = resolved(config, model, draft_model=draft_model, num_eos_ids=len(eos_token_ids))
        self.executor = Executor(model, sizes, draft_model=draft_model, fit_pool=config.num_pages is None)
        self.config = config = self.executor.config
        self.kv_cache = KVCacheManager(
            config.num_pages,
            config.page_size,
            windows=config.window_lists,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            self.kv_cache,
            max_num_seqs=config.max_num_seqs,
            prefill_tokens=config.prefill_tokens,
            prefill_seqs=config.prefill_seqs,
            max_chunk_tokens=config.max_chunk_tokens,
            num_draft_tokens=config.num_draft_tokens,
        )
        self.vocab_size, self.eos_token_ids = model.vocab_size, frozenset(eos_token_ids)
        self._admission = Admission(config, self.vocab_size, self.eos_token_ids)
        self._num_requests = 0
        self._aborting: deque[Request] = deque()
        self._busy = False
        self._cut_short = False

    def make_request(
        self, prompt: Any, params: SamplingParams, *, grammar: Grammar | None = None, cache_salt: str | None = None
    ) -> Request:
        """A request that fits this engine, not queued yet.

        Args:
            prompt: Token ids.
            params: How to go on from there.
            grammar: What `params.structured_outputs` comes to, at its beginning; the steps for it must have been
                compiled (`prepare_structured`) when the request is added.
            cache_salt: Requests share what is computed with those alone that have the same one: whoever does not know
                it cannot tell by the time to the first token whether somebody has sent a prompt. None is one of them.

        Raises:
            ValueError: The prompt is empty, too long, or holds an id that is no token; too many stop tokens, biases
                or log-probabilities; the request could outgrow the pool; `cache_salt` is empty.
        """
        request = self._admission.make_request(
            self._num_requests, prompt, params, grammar=grammar, cache_salt=cache_salt
        )
        self.scheduler.check(request)
        self._num_requests += 1
        return request

    def add(self, request: Request) -> None:
        """Queues a request made by `make_request`.

        Raises:
            ValueError: It was queued before, or has ended.
        """
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Ends a request at any stage and frees its pages; nothing happens if it has ended."""
        self._aborting.append(request)
        if not self._busy:  # the garbage collector may close a stream, and so call this, amid a step
            with self._guarded():
                pass

    def reset_prefix_cache(self) -> bool:
        """Forgets all that the prefix cache has; False, and nothing happens, while a request has pages."""
        with self._guarded():
            return self.kv_cache.clear()

    def prepare_structured(self) -> None:
        """Compiles the steps of requests with a grammar, if that is still to be done; from any thread, steps go on."""
        self.executor.prepare_structured()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[TokenEvent]:
        """Launches the next decodes and prefills, in one launch if that may be, then reads the launches before.

        Where a grammar must have followed the tokens of these to say what comes next, only the forward pass is launched
        ahead, and the choice of tokens behind it.
        """
        with self._guarded():
            self.executor.idle_time.look()
            events = self._read(0) if self.scheduler.must_preempt() else []
            before = len(self.executor.in_flight)
            for plan in self._plans():
                self.executor.submit(plan)
            events += self._read(len(self.executor.in_flight) - before) + self._sample()
            if not self.scheduler.has_work:
                self.executor.idle_time.no_work()
            return events

    def _plans(self) -> list[Plan]:
        """The next launches."""
        decoding = self.scheduler.plan_decode()
        mixed = decoding if self.executor.may_mix(decoding) else []
        chunks = self.scheduler.plan_prefill(len(mixed))
        plans = [Plan(mixed, chunks)] if mixed and chunks else [Plan(decoding), Plan((), chunks)]
        return [plan for plan in plans if plan.decoding or plan.chunks]

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around all that moves requests: aborts what is to be; if it is cut short, the next one starts over first."""
        self._busy = True
        try:
            if self._cut_short:
                self._restart()
            self._cut_short = True
            yield
            self._finish_aborted()
            self._cut_short = False
        finally:
            self._busy = False

    def _restart(self) -> None:
        """Goes on from the tokens read so far: a launch may have consumed pool and state."""
        self.executor.restart()
        for request in self.scheduler.restart():
            self._finish_if_complete(request)

    def _finish_aborted(self) -> None:
        while self._aborting:
            if not self._aborting[0].finished:
                self.scheduler.finish(self._aborting[0], "abort")
            self._aborting.popleft()

    def _finish_if_complete(self, request: Request) -> None:
        if request.generated and request.generated[-1] in request.stop_ids:
            self.scheduler.finish(request, "stop")
        elif reason := self._end_of_grammar(request):
            self.scheduler.finish(request, reason)
        elif request.num_tokens >= request.limit:
            self.scheduler.finish(request, "length")

    def _end_of_grammar(self, request: Request) -> FinishReason | None:
        if request.grammar is None:
            return None
        request.grammar.follow(request.generated)
        return request.grammar.finish_reason

    def _read(self, keep: int) -> list[TokenEvent]:
        """Waits for all launches but the `keep` newest."""
        events = []
        for launch in self.executor.read(keep):
            for request, place, logprobs in launch.prompt_logprobs():
                request.prompt_logprobs[place] = logprobs
            for given in launch.given():
                self._take(given, events)
        return events

    def _sample(self) -> list[TokenEvent]:
        """Launches the choice of tokens that forward passes wait for; ends requests that no token may follow."""
        events = []
        for request in self.executor.sample():
            if reason := request.grammar and request.grammar.finish_reason:
                self.scheduler.finish(request, reason)
                events.append(TokenEvent(request, None, reason))
        return events

    def _take(self, given: Given, events: list[TokenEvent]) -> None:
        """Takes what a launch gave a request, up to the token that ends it."""
        request = given.request
        if given.drafted is not None and given.accepted is not None:
            num_tokens = sum(token is not None for token in given.tokens)
            self.scheduler.note_accepted(request, max(0, num_tokens - 1))
            request.drafts.note_step(num_tokens, given.drafted, given.accepted)
        for i, token in enumerate(given.tokens):
            if request.finished:
                break
            events.append(self._take_token(request, token, given.logprobs[i] if given.logprobs else None))

    def _take_token(self, request: Request, token: int | None, logprobs: dict[int, Logprob] | None) -> TokenEvent:
        if token is None:
            self.scheduler.finish(request, "error")
            return TokenEvent(request, None, request.finish_reason)
        if logprobs is not None:
            # In its place before the token is: a call cut short between the two loses neither.
            request.logprobs[len(request.generated) :] = [logprobs]
        request.generated.append(token)
        self._finish_if_complete(request)
        return TokenEvent(request, token, request.finish_reason, logprobs)
