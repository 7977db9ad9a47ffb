"""LLM: text in, text out, over one engine."""

import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jattn.checkpoint import Checkpoint
from jattn.device_mesh import own_devices
from jattn.devices import started_devices
from jattn.model import load_model
from jattn.progress import logger, shown
from jattn.serving.config import EngineConfig
from jattn.serving.engine import Engine
from jattn.serving.fitting import check_fits
from jattn.serving.frontend.chat import ChatTemplate
from jattn.serving.frontend.config_fields import takes_fields_of
from jattn.serving.frontend.default_sampling import default_sampling
from jattn.serving.frontend.intake import Intake
from jattn.serving.frontend.outputs import Delta, RequestOutput, SequenceReader, gather
from jattn.serving.frontend.prompts import Prompt
from jattn.serving.frontend.text import Tokenizer
from jattn.serving.request import DraftCounts, Request, SamplingParams, token_ids
from jattn.serving.resolved_config import computing_dtype, parallel_of
from jattn.serving.steps.draft_model import DraftModel
from jattn.step_cache import use_persistent_cache


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
        knobs: The fields of `EngineConfig`, by their names.

    Raises:
        FileNotFoundError, ValueError: The checkpoint or a knob cannot be used; the message says why. What its
            configuration alone tells is said before a weight is read.
    """

    @takes_fields_of(EngineConfig)
    def __init__(self, path: str | Path, config: EngineConfig):
        for warning in started_devices()[1]:
            logger.warning("%s", warning)
        use_persistent_cache()
        checkpoint = Checkpoint(path).with_rope_scaling(config.rope_scaling)
        checkpoint = checkpoint.for_context(config.max_context_len).quantized(config.quantization)
        tokenizer, chat_template = Tokenizer(checkpoint.path), ChatTemplate(checkpoint.path)
        eos_token_ids = _eos_token_ids(checkpoint)
        drafter = config.speculative if isinstance(config.speculative, DraftModel) else None
        parallel = parallel_of(config)
        placed = {"dtype": computing_dtype(config), "parallel": parallel}
        default_params = SamplingParams(**default_sampling(checkpoint.generation_config, checkpoint.path))
        check_fits(config, checkpoint, num_eos_ids=len(eos_token_ids))
        num_reads = len(checkpoint.tensor_names) * (1 if parallel.axis is None else len(own_devices(parallel)))
        with shown("Loading weights", num_reads, wanted=config.progress) as advance:
            model = load_model(checkpoint.watched(advance), **placed)
        engine = Engine(
            model,
            config,
            draft_model=drafter.load(checkpoint, **placed) if drafter else None,
            eos_token_ids=eos_token_ids,
        )
        self._set_up(engine, tokenizer, chat_template, default_params)

    @classmethod
    def over(cls, engine: Engine, tokenizer: Tokenizer, chat_template: ChatTemplate) -> "LLM":
        """An LLM over an engine that was made elsewhere, as for weights that no checkpoint holds."""
        llm = cls.__new__(cls)
        llm._set_up(engine, tokenizer, chat_template, SamplingParams())
        return llm

    def _set_up(
        self, engine: Engine, tokenizer: Tokenizer, chat_template: ChatTemplate, default_params: SamplingParams
    ) -> None:
        self.engine, self.tokenizer, self.chat_template = engine, tokenizer, chat_template
        self.intake = Intake(self.engine, self.tokenizer, default_params)
        self._latest = _Latest(RunStats(requests=0, prompt_tokens=0, num_pages=self.engine.kv_cache.num_pages))
        self._running: list[RunStats] = []
        self._lock = threading.RLock()  # re-entered where the garbage collector closes a stream amid a step

    @property
    def stats(self) -> RunStats:
        """Figures of the call that this thread began last, up to now if it still runs."""
        return self._latest.stats

    def get_default_sampling_params(self) -> SamplingParams:
        """How the checkpoint's authors sample: what its generation_config.json says, and else the defaults."""
        return self.intake.default_params

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
            sampling_params: One for all or one for each; None is `get_default_sampling_params()`.
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
            sampling_params: One for all or one for each; None is `get_default_sampling_params()`.

        Raises:
            ValueError: A prompt cannot be served; none was started.
        """
        return self._serve(self._requests(prompts, sampling_params))

    def wait_for_steps(self, timeout: float | None = None) -> bool:
        """Whether all steps are compiled within so many seconds, or as long as it takes (`compile_in_background`)."""
        return self.engine.executor.background.wait(timeout)

    def reset_prefix_cache(self) -> bool:
        """Forgets all that the prefix cache has; False, and nothing happens, while requests are served."""
        with self._lock:
            return self.engine.reset_prefix_cache()

    def _requests(self, prompts: Any, sampling_params: Any) -> list[list[Request]]:
        return self.intake.make_requests(prompts, sampling_params)

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


def _eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    files = {"generation_config.json": checkpoint.generation_config, "config.json": checkpoint.config}
    for name, content in files.items():
        ids = content.get("eos_token_id")
        if ids is not None:
            return token_ids(ids if isinstance(ids, list) else [ids], f"`eos_token_id` of {checkpoint.path / name}")
    return ()
