"""The engine: the loop that plans on the host, launches on the device, and reads one step behind."""

import contextlib
import dataclasses
import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.backend import backend_class
from jattn.compiled_steps import StepPlan, compile_steps, smallest_bucket
from jattn.model import CausalLM
from jattn.serving.config import EngineConfig
from jattn.serving.executor.batches import decode_batch, prefill_batch, prompt_places
from jattn.serving.executor.checks import check_decode, check_prefill
from jattn.serving.executor.last_sent import LastSent
from jattn.serving.executor.mixing import may_mix, mixed_rows
from jattn.serving.executor.pool_memory import fitting_pool
from jattn.serving.kv_cache import KVCacheManager
from jattn.serving.request import FinishReason, Request, SamplingParams, token_ids
from jattn.serving.resolved_config import resolved
from jattn.serving.scheduler import Chunk, Scheduler
from jattn.serving.steps.draft_model import DraftModel, TargetAndDraft
from jattn.serving.steps.logit_rules import empty_history
from jattn.serving.steps.logprobs import Logprob, TokenLogprobs
from jattn.serving.steps.loop_state import NOT_KNOWN, LoopState, TokenRecord, empty_rows
from jattn.serving.steps.plain import NO_TOKEN, UNUSED, VARIANTS, StepOutput, Steps, Variant
from jattn.serving.steps.verification import SpeculativeSteps


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """A token that the host has just read, and whether it was the request's last; None where an error came instead.

    Attributes:
        logprobs: Of the token and the likeliest ones, by token id; None if not asked for.
    """

    request: Request
    token: int | None
    finish_reason: FinishReason | None
    logprobs: dict[int, Logprob] | None = None


@dataclasses.dataclass(frozen=True)
class _Launch:
    """Tokens on their way to the host: row i belongs to requests[i]; None where the row yields no token.

    Attributes:
        chunks: What a prefill computes.
    """

    output: StepOutput
    requests: list[Request | None]
    chunks: Sequence[Chunk]


class Engine:
    """Serves requests with one model: continuous batching, chunked prefill, preemption by recompute.

    For one thread at a time. A call that raises, even by Ctrl-C, loses no request: the next one starts them over.

    Args:
        model: The model; its weights stay on the device.
        config: What was asked for; what it leaves open is filled in.
        draft_model: The one that a `DraftModel` drafts with; else None.
        eos_token_ids: Tokens that end any request that does not ignore them.

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
        config = resolved(config, model, draft_model=draft_model, num_eos_ids=len(eos_token_ids))
        self.config = config
        served = model
        if draft_model is not None:
            served = TargetAndDraft(model, draft_model, max_context_len=config.max_context_len)
        self._make_pool = functools.partial(fitting_pool, served.kv_groups, config)
        self._pool = self._make_pool()
        self.kv_cache = KVCacheManager(config.num_pages, config.page_size)
        self.scheduler = Scheduler(
            self.kv_cache,
            max_num_seqs=config.max_num_seqs,
            prefill_tokens=config.prefill_tokens,
            prefill_seqs=config.prefill_seqs,
            max_chunk_tokens=config.max_chunk_tokens,
            num_draft_tokens=config.num_draft_tokens,
        )
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = model.vocab_size
        options = config.backend_options
        backend = backend_class(config.backend).for_model(served.attention_layers, options)
        self._mixed_rows = mixed_rows(config, served.attention_layers, options)
        graph, self._weights = nnx.split(served)
        self._state = self._empty_state()
        self._max_logprobs = min(config.max_logprobs, model.vocab_size)
        parts = (graph, backend, self._max_logprobs)
        steps = Steps(*parts) if config.speculative is None else SpeculativeSteps(*parts, drafter=config.speculative)
        self.compiled_steps = compile_steps(self._plans(steps), progress=config.progress)
        self._in_flight: deque[_Launch] = deque()
        self._on_device = LastSent()  # a row's last pages are the same for `page_size` steps
        # Also at exit: the interpreter dies if it takes down what a launch still uses.
        self._finalizer = weakref.finalize(self, _wait_for, self._in_flight)
        self._num_requests = 0
        self._aborting: deque[Request] = deque()
        self._busy = False
        self._cut_short = False

    def make_request(self, prompt: Any, params: SamplingParams) -> Request:
        """A request that fits this engine, not queued yet.

        Args:
            prompt: Token ids.
            params: How to go on from there.

        Raises:
            ValueError: The prompt is empty, too long, or holds an id that is no token; too many stop tokens, biases
                or log-probabilities; the request could outgrow the pool.
        """
        prompt = list(token_ids(prompt, "Token ids", self._vocab_size))
        if not prompt:
            raise ValueError("A prompt must have at least one token.")
        if len(prompt) >= self.config.max_context_len:
            raise ValueError(
                f"A prompt must leave room for a token in the context of {self.config.max_context_len} tokens. "
                f"Got a prompt of {len(prompt)}."
            )
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        if len(stop_ids) > self.config.max_stop_ids:
            raise ValueError(
                f"A request may have {self.config.max_stop_ids} stop tokens, the model's own included. "
                f"Got {len(stop_ids)}."
            )
        request = Request(
            number=self._num_requests,
            prompt=prompt,
            params=params,
            limit=min(len(prompt) + params.max_tokens, self.config.max_context_len),
            stop_ids=stop_ids,
        )
        self._check_full(params)
        self.scheduler.check(request)
        self._num_requests += 1
        return request

    def _check_full(self, params: SamplingParams) -> None:
        """Says whether the full steps can do what `params` asks of them."""
        config = self.config
        if _needs_full(params) and not config.full_sampling:
            raise ValueError(
                "Penalties, `logit_bias`, `min_tokens`, `logprobs` and `prompt_logprobs` need an engine with "
                f"`full_sampling`. Got full_sampling={config.full_sampling}."
            )
        bias = params.logit_bias or {}
        token_ids(bias, "The token ids of `logit_bias`", self._vocab_size)
        if len(bias) > config.max_logit_bias:
            raise ValueError(f"`logit_bias` must have at most {config.max_logit_bias} tokens. Got {len(bias)}.")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self._max_logprobs:
                raise ValueError(f"`{name}` must be at most {self._max_logprobs}. Got {getattr(params, name)}.")

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

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[TokenEvent]:
        """Launches the next decodes and prefills, in one launch if that may be, then reads the launches before."""
        with self._guarded():
            events = self._read(0) if self.scheduler.must_preempt() else []
            before = len(self._in_flight)
            requests = self.scheduler.plan_decode()
            mixed = requests if may_mix(requests, self._mixed_rows) else []
            chunks = self.scheduler.plan_prefill(len(mixed))
            if requests and not (chunks and mixed):
                self._launch_decode(requests)
            if chunks:
                self._launch_prefill(chunks, mixed)
            return events + self._read(len(self._in_flight) - before)

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
        """Goes on from the tokens read so far, with a new pool and state: a launch may have consumed the old ones."""
        _wait_for(self._in_flight)
        self._in_flight.clear()
        self._pool = self._state = None  # their memory is needed for the new ones
        self._pool = self._make_pool()
        self._state = self._empty_state()
        self._on_device = LastSent()  # what was sent may be what failed
        for request in self.scheduler.restart():
            self._finish_if_complete(request)

    def _empty_state(self) -> LoopState:
        config = self.config
        state = empty_rows(
            config.max_num_seqs,
            max_pages=config.max_pages,
            max_stop_ids=config.max_stop_ids,
            max_logit_bias=config.max_logit_bias if config.full_sampling else None,
            with_limits=config.speculative is not None,
        )
        if state.tokens:
            ids = jnp.full((config.max_num_seqs, config.max_context_len), NOT_KNOWN, jnp.int32)
            state = dataclasses.replace(state, tokens=TokenRecord(limits=state.tokens.limits, ids=ids))
        if not config.full_sampling:
            return state
        history = empty_history(config.max_num_seqs, self._vocab_size, config.max_context_len)
        return dataclasses.replace(state, history=history)

    def _finish_aborted(self) -> None:
        while self._aborting:
            if not self._aborting[0].finished:
                self.scheduler.finish(self._aborting[0], "abort")
            self._aborting.popleft()

    def _finish_if_complete(self, request: Request) -> None:
        if request.generated and request.generated[-1] in request.stop_ids:
            self.scheduler.finish(request, "stop")
        elif request.num_tokens >= request.limit:
            self.scheduler.finish(request, "length")

    def _read(self, keep: int) -> list[TokenEvent]:
        """Waits for all launches but the `keep` newest."""
        events = []
        while len(self._in_flight) > keep:
            launch = self._in_flight.popleft()
            output = jax.device_get(launch.output)
            self._read_prompt_logprobs(launch.chunks, output.prompt_logprobs)
            tokens = output.tokens.reshape(len(output.tokens), -1).tolist()
            for row, (request, of_row) in enumerate(zip(launch.requests, tokens, strict=False)):
                if request is None or request.finished:
                    continue
                if output.drafts is not None:
                    self._note_drafts(request, of_row, *output.drafts[row].tolist())
                for place, token in enumerate(of_row, row * len(of_row)):
                    if token == UNUSED or request.finished:
                        break
                    events.append(self._read_token(request, token, place, output.logprobs))
        return events

    def _read_token(self, request: Request, token: int, place: int, of_launch: TokenLogprobs | None) -> TokenEvent:
        """A token of a launch; its log-probabilities are in `place`."""
        if token == NO_TOKEN:
            self.scheduler.finish(request, "error")
            return TokenEvent(request, None, request.finish_reason)
        logprobs = None
        if of_launch is not None and request.params.logprobs is not None:
            # In its place before the token is: a call cut short between the two loses neither.
            logprobs = of_launch.at(place, token, request.params.logprobs)
            request.logprobs[len(request.generated) :] = [logprobs]
        request.generated.append(token)
        self._finish_if_complete(request)
        return TokenEvent(request, token, request.finish_reason, logprobs)

    def _note_drafts(self, request: Request, tokens: list[int], drafted: int, accepted: int) -> None:
        num_tokens = sum(token >= 0 for token in tokens)
        self.scheduler.note_accepted(request, max(0, num_tokens - 1))
        request.drafts.note_step(num_tokens, drafted, accepted)

    def _read_prompt_logprobs(self, chunks: Sequence[Chunk], logprobs: TokenLogprobs | None) -> None:
        begin = 0
        for chunk in chunks:
            request = chunk.request
            for i, place in enumerate(prompt_places(chunk), begin):
                assert logprobs is not None
                token, count = request.prompt[place], request.params.prompt_logprobs
                request.prompt_logprobs[place] = logprobs.at(i, token, count or 0)
            begin += chunk.stop - chunk.start

    def _launch_decode(self, requests: list[Request]) -> None:
        bucket = smallest_bucket(self.config.decode_buckets, len(requests))
        plan = decode_batch(requests, bucket, self.config)
        if self.config.debug_checks:
            assert self._state is not None
            check_decode(self._state, plan, self.config)
        self._launch(("decode", bucket, _variant(requests)), list(requests), self._on_device(plan))

    def _launch_prefill(self, chunks: list[Chunk], decoding: list[Request]) -> None:
        num_tokens = sum(chunk.stop - chunk.start for chunk in chunks) + len(decoding)
        bucket = smallest_bucket(self.config.prefill_buckets, num_tokens)
        variant = _variant([chunk.request for chunk in chunks] + decoding)
        plan = decode_batch(decoding, self._mixed_rows, self.config)
        batch = prefill_batch(chunks, bucket, self.config, variant)
        if self.config.debug_checks:
            assert self._state is not None
            check_prefill(self._state, plan, batch, self.config)
        by_row = {request.row: request for request in decoding + [chunk.request for chunk in chunks if chunk.is_last]}
        requests = [by_row.get(row) for row in range(self.config.max_num_seqs)]
        self._launch(("prefill", bucket, variant), requests, plan, batch, chunks=chunks)

    def _launch(
        self, step: tuple[str, int, Variant], requests: list[Request | None], *arguments, chunks: Sequence[Chunk] = ()
    ) -> None:
        """Enqueues a step.

        It consumes the state and pool that the launch before it gives, so launches run in this order on the device: a
        page freed while a launch still writes to it is safe in the hands of its next owner.
        """
        output, self._state, self._pool = self.compiled_steps(step, self._weights, self._state, self._pool, *arguments)
        jax.tree.map(lambda leaf: leaf.copy_to_host_async(), output)
        self._in_flight.append(_Launch(output, requests, chunks))

    def _plans(self, steps: Steps) -> dict[Any, StepPlan]:
        held = (self._weights, self._state, self._pool)
        unrolled = self.config.speculative is None  # a draft model's loop over tokens holds one over its layers
        plans = {}
        for variant in VARIANTS if self.config.full_sampling else VARIANTS[:2]:
            decode = functools.partial(steps.decode, variant=variant)
            prefill = functools.partial(steps.prefill, variant=variant)
            for size in self.config.decode_buckets:
                arguments = (*held, decode_batch([], size, self.config))
                plans["decode", size, variant] = StepPlan(decode, arguments, donate=(1, 2), unrolled=unrolled)
            for size in self.config.prefill_buckets:
                batch = prefill_batch([], size, self.config, variant)
                arguments = (*held, decode_batch([], self._mixed_rows, self.config), batch)
                plans["prefill", size, variant] = StepPlan(prefill, arguments, donate=(1, 2))
        return plans


def _wait_for(launches: Iterable[_Launch]) -> None:
    """Returns once they have run, whether or not they failed."""
    for launch in launches:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready(launch.output)


def _needs_full(params: SamplingParams) -> bool:
    return params.has_logit_rules or params.has_logprobs


def _variant(requests: list[Request]) -> Variant:
    """The cheapest steps that serve all of the requests."""
    if any(_needs_full(request.params) for request in requests):
        return "full"
    return "greedy" if all(request.params.temperature == 0 for request in requests) else "plain"
