"""LLM: text in, text out, over one engine."""

import dataclasses
import numbers
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from jattn.checkpoint import Checkpoint
from jattn.compiled_steps import use_persistent_cache
from jattn.kv_pool import KVGroupSpec
from jattn.model import model_class
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.request import FinishReason, Request, SamplingParams, token_ids
from jattn.serving.text import StreamDecoder, Tokenizer

Prompt = str | Sequence[SupportsIndex] | np.ndarray

_STOP_IDS = 8  # that a request may add to the checkpoint's
_POOL_BYTES_WITHOUT_STATS = 2**30  # where a device does not say how much memory it has: CPU
_POOL_SHARE = 0.85  # of the device memory that the weights leave; the rest is for the steps' temporaries


@dataclasses.dataclass(frozen=True)
class Delta:
    """New text of one request.

    Attributes:
        index: Which prompt.
        text: May be empty while a character is incomplete.
        token_ids: The tokens behind it.
        finish_reason: Set on the request's last delta.
        error: Why it ended, in a sentence, if the reason is "error".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        error: Why it ended, in a sentence, if the reason is "error"; text and tokens are what came before.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str | None = None


@dataclasses.dataclass(kw_only=True)
class RunStats:
    """Figures of one `generate` or `stream` call; times in seconds, pages in whole pages of the pool.

    Attributes:
        peak_pages: In use at once while the call ran, by whichever requests.
        preemptions: Of the call's own requests.
    """

    requests: int
    prompt_tokens: int
    num_pages: int
    generated_tokens: int = 0
    seconds: float = 0.0
    time_to_first_token: float = 0.0
    peak_pages: int = 0
    preemptions: int = 0


class _Latest(threading.local):
    """Each thread's own."""

    def __init__(self, stats: RunStats):
        self.stats = stats


class LLM:
    """A checkpoint, ready to serve. Threads may share it: they take turns, and one's step serves the others' requests.

    Args:
        path: Hugging Face checkpoint folder.
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on CPU, bfloat16 elsewhere.
        page_size: Tokens a page.
        num_pages: Pages of the pool, the reserved one included; None takes what the requests can use, or what fits.
        max_num_seqs: Requests served at the same time.
        max_context_len: Longest request in tokens; the model's own if None.
        prefill_tokens: Prompt tokens of a launch at most.
        max_chunk_tokens: Of them, one prompt's at most; None is all. A lower number lets short prompts pass a long one.
        implementation: Which attention kernels; None lets dispatch choose.
        debug_checks: Whether to check what each launch will use; slow.
        progress: Whether to show a bar on standard error while the steps compile.

    Raises:
        FileNotFoundError, ValueError: The checkpoint or a size cannot be used; the message says why.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "auto",
        page_size: int = 16,
        num_pages: int | None = None,
        max_num_seqs: int = 8,
        max_context_len: int | None = None,
        prefill_tokens: int = 256,
        max_chunk_tokens: int | None = None,
        implementation: str | None = None,
        debug_checks: bool = False,
        progress: bool = True,
    ):
        use_persistent_cache()
        checkpoint = Checkpoint(path)
        self.tokenizer = Tokenizer(checkpoint.path)
        eos_token_ids = _eos_token_ids(checkpoint)
        weights_dtype = _dtype(dtype)
        model = model_class(checkpoint.architecture).from_checkpoint(checkpoint, dtype=weights_dtype)
        context = model.context_len if max_context_len is None else max_context_len
        if num_pages is None:
            num_pages = _default_pages(model.kv_groups, page_size, weights_dtype, max_num_seqs * context)
        self.engine = Engine(
            model,
            EngineConfig(
                page_size=page_size,
                num_pages=num_pages,
                max_num_seqs=max_num_seqs,
                max_context_len=context,
                prefill_tokens=prefill_tokens,
                prefill_seqs=max_num_seqs,
                max_chunk_tokens=max_chunk_tokens,
                max_stop_ids=len(eos_token_ids) + _STOP_IDS,
                implementation=implementation,
                debug_checks=debug_checks,
            ),
            eos_token_ids=eos_token_ids,
            dtype=weights_dtype,
            progress=progress,
        )
        self._latest = _Latest(RunStats(requests=0, prompt_tokens=0, num_pages=self.engine.allocator.num_pages))
        self._running: list[RunStats] = []
        self._lock = threading.RLock()  # re-entered where the garbage collector closes a stream amid a step

    @property
    def stats(self) -> RunStats:
        """Figures of the call that this thread began last, up to now if it still runs."""
        return self._latest.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the prompts; see `stream`."""
        requests = self._requests(prompts, sampling_params)
        texts = [""] * len(requests)
        for delta in self._serve(requests):
            texts[delta.index] += delta.text
        return [
            Completion(
                tuple(request.prompt), tuple(request.generated), text, request.finish_reason or "abort", request.error
            )
            for request, text in zip(requests, texts, strict=True)
        ]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """Text as it comes, of all prompts at once. All are checked before the first one starts.

        Leaving the iterator early ends the requests and frees their pages.

        Args:
            prompts: Texts or token ids; one alone will do.
            sampling_params: One for all or one for each; None is `SamplingParams()`.

        Raises:
            ValueError: A prompt cannot be served; none was started.
        """
        return self._serve(self._requests(prompts, sampling_params))

    def _requests(self, prompts, sampling_params) -> list[Request]:
        prompts = [prompts] if isinstance(prompts, str | bytes | bytearray) else list(prompts)
        if prompts and isinstance(prompts[0], numbers.Number):
            prompts = [prompts]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                "`sampling_params` must be one for all prompts or one for each. "
                f"Got {len(sampling_params)} for {len(prompts)} prompts."
            )
        ids = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        with self._lock:
            return [self.engine.make_request(*pair) for pair in zip(ids, sampling_params, strict=True)]

    def _serve(self, requests: list[Request]) -> Iterator[Delta]:
        stats = self._latest.stats = RunStats(
            requests=len(requests),
            prompt_tokens=sum(len(request.prompt) for request in requests),
            num_pages=self.engine.allocator.num_pages,
        )
        decoders = [StreamDecoder(self.tokenizer) for _ in requests]
        start = time.perf_counter()
        try:
            with self._lock:
                self._running.append(stats)
                for request in requests:
                    self.engine.add(request)
            for i, tokens, finish_reason in self._tokens(requests):
                text = decoders[i].push(tokens)
                if finish_reason:
                    text += decoders[i].finish()
                stats.generated_tokens += len(tokens)
                stats.seconds = time.perf_counter() - start
                if tokens and not stats.time_to_first_token:
                    stats.time_to_first_token = stats.seconds
                stats.preemptions = sum(request.num_preemptions for request in requests)
                yield Delta(i, text, tokens, finish_reason, requests[i].error if finish_reason else None)
        finally:
            with self._lock:
                self._running = [other for other in self._running if other is not stats]
                for request in requests:
                    self.engine.abort(request)

    def _tokens(self, requests: list[Request]) -> Iterator[tuple[int, tuple[int, ...], FinishReason | None]]:
        """Each request's tokens one by one, the reason with its last one or, where it ended without one, alone."""
        counts = [0] * len(requests)
        unfinished = list(range(len(requests)))
        while unfinished:
            with self._lock:
                # Another stream's step may have read some.
                if all(len(requests[i].generated) == counts[i] and not requests[i].finished for i in unfinished):
                    self._step()
                reasons: list[FinishReason | None] = [requests[i].finish_reason for i in unfinished]
                ends = [len(requests[i].generated) for i in unfinished]
            for i, end, reason in zip(unfinished, ends, reasons, strict=True):
                if reason and counts[i] == end:
                    yield i, (), reason
                while counts[i] < end:
                    counts[i] += 1
                    yield i, (requests[i].generated[counts[i] - 1],), reason if counts[i] == end else None
            unfinished = [i for i, reason in zip(unfinished, reasons, strict=True) if reason is None]

    def _step(self) -> None:
        self.engine.step()
        for stats in self._running:
            stats.peak_pages = max(stats.peak_pages, self.engine.scheduler.peak_pages)


def _dtype(name: str):
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"`dtype` must be one of auto, float32, bfloat16, float16. Got {name!r}.")
    return jnp.dtype(name)


def _eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    files = {"generation_config.json": checkpoint.generation_config, "config.json": checkpoint.config}
    for name, content in files.items():
        ids = content.get("eos_token_id")
        if ids is not None:
            return token_ids(ids if isinstance(ids, list) else [ids], f"`eos_token_id` of {checkpoint.path / name}")
    return ()


def _default_pages(groups: tuple[KVGroupSpec, ...], page_size: int, dtype, most_tokens: int) -> int:
    """Pages for `most_tokens` in full pages, or as many as the device holds beside the weights."""
    if page_size < 1:
        raise ValueError(f"`page_size` must be at least 1. Got {page_size}.")
    stats = jax.local_devices()[0].memory_stats() or {}
    budget = _POOL_BYTES_WITHOUT_STATS
    if "bytes_limit" in stats:
        budget = _POOL_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"])
    fitting = int(budget) // sum(group.page_bytes(page_size, dtype) for group in groups)
    if fitting < 2:
        raise ValueError(
            f"`page_size` must be so small that 2 pages fit the {max(int(budget), 0)} bytes left for the pool. "
            f"Got {page_size}."
        )
    return min(-(-most_tokens // page_size) + 1, fitting)
