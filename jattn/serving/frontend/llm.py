"""LLM: text in, text out, over one engine."""

import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jattn.arguments import whole_number
from jattn.backend import backend_class
from jattn.checkpoint import Checkpoint
from jattn.compiled_steps import use_persistent_cache
from jattn.kv_cache_dtype import stored_dtype
from jattn.kv_pool import KVGroupSpec
from jattn.model import model_class
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.frontend.chat import ChatTemplate
from jattn.serving.frontend.outputs import Delta, RequestOutput, SequenceReader, gather
from jattn.serving.frontend.prompts import Prompt, listed
from jattn.serving.frontend.text import Tokenizer
from jattn.serving.request import DraftCounts, Request, SamplingParams, token_ids
from jattn.serving.steps.draft_model import DraftModel
from jattn.serving.steps.drafting import Drafter, check_drafter

_STOP_IDS = 8  # that a request may add to the checkpoint's
_POOL_BYTES_WITHOUT_STATS = 2**30  # where a device does not say how much memory it has: CPU
_POOL_SHARE = 0.85  # of the device memory that the weights leave; the rest is for the steps' temporaries


@dataclasses.dataclass(kw_only=True)
class RunStats:
    """Figures of one `generate` or `stream` call; times in seconds, pages in whole pages of the pool.

    Attributes:
        peak_pages: In use at once while the call ran, by whichever requests.
        preemptions: Of the call's own requests.
        drafts: What became of the tokens drafted for them; counts nothing where none are.
    """

    requests: int
    prompt_tokens: int
    num_pages: int
    generated_tokens: int = 0
    seconds: float = 0.0
    time_to_first_token: float = 0.0
    peak_pages: int = 0
    preemptions: int = 0
    drafts: DraftCounts = dataclasses.field(default_factory=DraftCounts)


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
        prefill_tokens: Tokens of a launch with prompts at most.
        max_chunk_tokens: Of them, one prompt's at most; None is all. A lower number lets short prompts pass a long one.
        mixed_steps: Whether such a launch decodes the running requests too; None does where the GPU's kernels suit it.
        full_sampling: Whether requests may ask for penalties, `logit_bias`, `min_tokens` and log-probabilities; without
            it, start-up is a third shorter.
        max_logprobs: Likeliest tokens whose log-probabilities a request may ask for.
        backend: Which attention surface, "flash_attention" or "flashinfer".
        kv_cache_dtype: What the pool stores: "auto", which is `dtype`, "fp8_e4m3" or "fp8_e5m2".
        implementation: Which attention kernels; None lets dispatch choose.
        speculative: Who drafts tokens for each decode step to verify, so that it gives several; None is plain decode.
            The text is the same.
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
        mixed_steps: bool | None = None,
        full_sampling: bool = True,
        max_logprobs: int = 20,
        backend: str = "flash_attention",
        kv_cache_dtype: str = "auto",
        implementation: str | None = None,
        speculative: Drafter | None = None,
        debug_checks: bool = False,
        progress: bool = True,
    ):
        check_drafter(speculative)
        use_persistent_cache()
        checkpoint = Checkpoint(path).for_context(max_context_len)
        self.tokenizer = Tokenizer(checkpoint.path)
        self.chat_template = ChatTemplate(checkpoint.path)
        eos_token_ids = _eos_token_ids(checkpoint)
        weights_dtype = _dtype(dtype)
        pool_dtype = stored_dtype(kv_cache_dtype, weights_dtype)
        backend_class(backend)  # an unknown name is refused before the weights load
        model = model_class(checkpoint.architecture).from_checkpoint(checkpoint, dtype=weights_dtype)
        draft_model = speculative.load(checkpoint, dtype=weights_dtype) if isinstance(speculative, DraftModel) else None
        context = model.context_len if max_context_len is None else max_context_len
        for name, size in (("page_size", page_size), ("max_num_seqs", max_num_seqs), ("max_context_len", context)):
            whole_number(size, f"`{name}` must be a whole number of at least 1.", 1)
        if num_pages is None:
            pages_each = -(-(context + (speculative.num_draft_tokens if speculative else 0)) // page_size)
            groups = (*model.kv_groups, *(draft_model.kv_groups if draft_model else ()))
            num_pages = _default_pages(groups, page_size, pool_dtype, max_num_seqs * pages_each)
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
                mixed_steps=mixed_steps,
                max_stop_ids=len(eos_token_ids) + _STOP_IDS,
                full_sampling=full_sampling,
                max_logprobs=max_logprobs,
                backend=backend,
                kv_cache_dtype=kv_cache_dtype,
                implementation=implementation,
                speculative=speculative,
                debug_checks=debug_checks,
            ),
            draft_model=draft_model,
            eos_token_ids=eos_token_ids,
            dtype=weights_dtype,
            progress=progress,
        )
        self._latest = _Latest(RunStats(requests=0, prompt_tokens=0, num_pages=self.engine.kv_cache.num_pages))
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
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts; see `stream`."""
        requests = self._requests(prompts, sampling_params)
        return gather([of_prompt[0].prompt for of_prompt in requests], self._serve(requests))

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """The assistant's answers to conversations, in their order.

        Args:
            messages: A conversation, as for `ChatTemplate.render`, or a list of them.
            sampling_params: One for all or one for each; None is `SamplingParams()`.
            options: Of `ChatTemplate.render`.

        Raises:
            ValueError: The checkpoint has no chat template, or a conversation cannot be served; none was started.
        """
        several = isinstance(messages, Sequence) and messages and not isinstance(messages[0], str | Mapping)
        conversations = messages if several else [messages]
        return self.generate([self.chat_tokens(each, **options) for each in conversations], sampling_params)

    def chat_tokens(self, messages: Any, **options: Any) -> list[int]:
        """The prompt that `chat` makes of a conversation; `stream` takes it too.

        Args:
            messages: A conversation.
            options: Of `ChatTemplate.render`.

        Raises:
            ValueError: The checkpoint has no chat template, or it refuses the messages.
        """
        return self.tokenizer.encode(self.chat_template.render(messages, **options), add_special_tokens=False)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """Text as it comes, of all prompts at once. All are checked before the first one starts.

        Leaving the iterator early ends the requests and frees their pages.

        Args:
            prompts: Texts or token ids, bare or as vLLM's mappings of them; one alone will do.
            sampling_params: One for all or one for each; None is `SamplingParams()`.

        Raises:
            ValueError: A prompt cannot be served; none was started.
        """
        return self._serve(self._requests(prompts, sampling_params))

    def _requests(self, prompts, sampling_params) -> list[list[Request]]:
        """A request for each sequence of each prompt."""
        prompts = listed(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        is_several = isinstance(sampling_params, Sequence)
        if not is_several or not all(isinstance(params, SamplingParams) for params in sampling_params):
            raise ValueError(f"`sampling_params` must be `SamplingParams`, or several. Got {sampling_params!r}.")
        if len(sampling_params) != len(prompts):
            raise ValueError(
                "`sampling_params` must be one for all prompts or one for each. "
                f"Got {len(sampling_params)} for {len(prompts)} prompts."
            )
        ids = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        with self._lock:
            return [
                [self.engine.make_request(prompt, params.of_sequence(i)) for i in range(params.n)]
                for prompt, params in zip(ids, sampling_params, strict=True)
            ]

    def _serve(self, requests: list[list[Request]]) -> Iterator[Delta]:
        stats = self._latest.stats = RunStats(
            requests=len(requests),
            prompt_tokens=sum(len(of_prompt[0].prompt) for of_prompt in requests),
            num_pages=self.engine.kv_cache.num_pages,
        )
        readers = [
            SequenceReader(request, self.tokenizer, index=index, output_index=output_index)
            for index, of_prompt in enumerate(requests)
            for output_index, request in enumerate(of_prompt)
        ]
        start = time.perf_counter()
        try:
            with self._lock:
                self._running.append(stats)
                for reader in readers:
                    reader.request.drafts = stats.drafts
                    self.engine.add(reader.request)
            for delta in self._deltas(readers):
                stats.generated_tokens += len(delta.token_ids)
                stats.seconds = time.perf_counter() - start
                if delta.token_ids and not stats.time_to_first_token:
                    stats.time_to_first_token = stats.seconds
                stats.preemptions = sum(reader.request.num_preemptions for reader in readers)
                yield delta
        finally:
            with self._lock:
                self._running = [other for other in self._running if other is not stats]
                for reader in readers:
                    self.engine.abort(reader.request)

    def _deltas(self, readers: list[SequenceReader]) -> Iterator[Delta]:
        while readers:
            with self._lock:
                # Another stream's step may have read some.
                if not any(reader.has_news for reader in readers):
                    self._step()
                deltas = [delta for reader in readers for delta in reader.read()]
                for reader in readers:
                    if reader.finished:
                        self.engine.abort(reader.request)  # at a stop string it still runs
            yield from deltas
            readers = [reader for reader in readers if not reader.finished]

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


def _default_pages(groups: tuple[KVGroupSpec, ...], page_size: int, dtype, most_pages: int) -> int:
    """`most_pages` beside the reserved one, or as many as the device holds beside the weights."""
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
    return min(most_pages + 1, fitting)
