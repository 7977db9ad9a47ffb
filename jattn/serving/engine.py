"""The engine: the loop that plans on the host, launches on the device, and reads one step behind."""

import dataclasses
import functools
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.backend import backend_class
from jattn.compiled_steps import StepPlan, compile_steps, smallest_bucket
from jattn.flash_attention import FlashAttentionConfig
from jattn.kv_pool import make_pool
from jattn.model import CausalLM
from jattn.page_allocator import PageAllocator
from jattn.serving.batches import decode_batch, prefill_batch
from jattn.serving.config import EngineConfig
from jattn.serving.loop_state import empty_rows
from jattn.serving.request import FinishReason, Request, SamplingParams
from jattn.serving.scheduler import Chunk, Scheduler
from jattn.serving.steps import Steps


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """A token that the host has just read, and whether it was the request's last."""

    request: Request
    token: int
    finish_reason: FinishReason | None


@dataclasses.dataclass(frozen=True)
class _Launch:
    """Tokens on their way to the host: row i belongs to requests[i]; None where the row yields no token."""

    tokens: jax.Array
    requests: list[Request | None]


class Engine:
    """Serves requests with one model: continuous batching, chunked prefill, preemption by recompute.

    Args:
        model: The model; its weights stay on the device.
        config: Sizes.
        eos_token_ids: Tokens that end any request that does not ignore them.
        dtype: Of the keys and values in the pool.
        progress: Whether to show a bar while the steps compile.
    """

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        *,
        eos_token_ids: tuple[int, ...] = (),
        dtype: Any = jnp.float32,
        progress: bool = False,
    ):
        if config.max_context_len > model.context_len:
            raise ValueError(
                f"`max_context_len` must not exceed the model's {model.context_len}. Got {config.max_context_len}."
            )
        self.config = config
        self.allocator = PageAllocator(config.num_pages)
        self.scheduler = Scheduler(
            self.allocator,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            prefill_tokens=config.prefill_tokens,
            prefill_seqs=config.prefill_seqs,
        )
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = model.vocab_size
        backend = backend_class("flash_attention")(
            FlashAttentionConfig(
                max_context_len=config.max_context_len,
                page_size=config.page_size,
                implementation=config.implementation,
            )
        )
        graph, self._weights = nnx.split(model)
        self._pool = make_pool(model.kv_groups, num_pages=config.num_pages, page_size=config.page_size, dtype=dtype)
        self._state = empty_rows(config.max_num_seqs, max_pages=config.max_pages, max_stop_ids=config.max_stop_ids)
        self.compiled_steps = compile_steps(self._plans(Steps(graph, backend, config.page_size)), progress=progress)
        self._in_flight: deque[_Launch] = deque()
        self._num_requests = 0

    def make_request(self, prompt: list[int], params: SamplingParams) -> Request:
        """A request that fits this engine, not queued yet.

        Raises:
            ValueError: The prompt is empty, too long, or holds an id that is no token; too many stop tokens; the
                request could outgrow the pool.
        """
        if not prompt:
            raise ValueError("A prompt must have at least one token.")
        if len(prompt) >= self.config.max_context_len:
            raise ValueError(
                f"A prompt must leave room for a token in the context of {self.config.max_context_len} tokens. "
                f"Got a prompt of {len(prompt)}."
            )
        wrong = next((token for token in prompt if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise ValueError(f"Token ids must be at least 0 and below {self._vocab_size}. Got {wrong}.")
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        if len(stop_ids) > self.config.max_stop_ids:
            raise ValueError(
                f"A request may have {self.config.max_stop_ids} stop tokens, the model's own included. "
                f"Got {len(stop_ids)}."
            )
        request = Request(
            number=self._num_requests,
            prompt=list(prompt),
            params=params,
            limit=min(len(prompt) + params.max_tokens, self.config.max_context_len),
            stop_ids=stop_ids,
        )
        self.scheduler.check(request)
        self._num_requests += 1
        return request

    def add(self, request: Request) -> None:
        """Queues a request made by `make_request`."""
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Ends a request at any stage and frees its pages; nothing happens if it has ended."""
        if not request.finished:
            self.scheduler.finish(request, "abort")

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[TokenEvent]:
        """Launches the next decode and prefill, then reads the tokens of the launches before them."""
        events = self._read(0) if self.scheduler.must_preempt() else []
        before = len(self._in_flight)
        if requests := self.scheduler.plan_decode():
            self._launch_decode(requests)
        if chunks := self.scheduler.plan_prefill():
            self._launch_prefill(chunks)
        return events + self._read(len(self._in_flight) - before)

    def _read(self, keep: int) -> list[TokenEvent]:
        """Waits for all launches but the `keep` newest."""
        events = []
        while len(self._in_flight) > keep:
            launch = self._in_flight.popleft()
            for request, token in zip(launch.requests, np.asarray(launch.tokens).tolist(), strict=False):
                if request is None or request.finished:
                    continue
                request.generated.append(token)
                if token in request.stop_ids:
                    self.scheduler.finish(request, "stop")
                elif len(request.tokens) == request.limit:
                    self.scheduler.finish(request, "length")
                events.append(TokenEvent(request, token, request.finish_reason))
        return events

    def _launch_decode(self, requests: list[Request]) -> None:
        bucket = smallest_bucket(self.config.decode_buckets, len(requests))
        self._launch(("decode", bucket), list(requests), *decode_batch(requests, bucket, self.config))

    def _launch_prefill(self, chunks: list[Chunk]) -> None:
        num_tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        bucket = smallest_bucket(self.config.prefill_buckets, num_tokens)
        batch = prefill_batch(chunks, bucket, self.config)
        self._launch(("prefill", bucket), [chunk.request if chunk.is_last else None for chunk in chunks], batch)

    def _launch(self, step: tuple[str, int], requests: list[Request | None], *arguments) -> None:
        greedy_only = all(request is None or request.params.temperature == 0 for request in requests)
        tokens, self._state, self._pool = self.compiled_steps(
            (*step, greedy_only), self._weights, self._state, self._pool, *arguments
        )
        tokens.copy_to_host_async()
        self._in_flight.append(_Launch(tokens, requests))

    def _plans(self, steps: Steps) -> dict[Any, StepPlan]:
        held = (self._weights, self._state, self._pool)
        plans = {}
        for greedy_only in (True, False):
            decode = functools.partial(steps.decode, greedy_only=greedy_only)
            prefill = functools.partial(steps.prefill, greedy_only=greedy_only)
            for size in self.config.decode_buckets:
                arguments = (*held, *decode_batch([], size, self.config))
                plans["decode", size, greedy_only] = StepPlan(decode, arguments, donate=(1, 2))
            for size in self.config.prefill_buckets:
                arguments = (*held, prefill_batch([], size, self.config))
                plans["prefill", size, greedy_only] = StepPlan(prefill, arguments, donate=(1, 2))
        return plans
