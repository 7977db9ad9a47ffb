"""Intake: prompts and parameters, as callers give them, to an engine's requests."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn.serving.engine import Engine
from jattn.serving.frontend.bad_words import without_bad_words
from jattn.serving.frontend.prompts import listed
from jattn.serving.frontend.text import Tokenizer
from jattn.serving.request import Request, SamplingParams
from jattn.serving.structured.compiler import GrammarCompiler


class Intake:
    """Makes requests of one engine, from any thread.

    Args:
        engine: The requests are for it; they are not queued yet.
        default_params: For callers that give none.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, default_params: SamplingParams):
        self.default_params = default_params
        self._engine = engine
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(self._tokenizer_json, engine.eos_token_ids)
        self._lock = threading.Lock()  # the engine counts its requests

    def make_requests(
        self, prompts: Any, sampling_params: Any = None, *, grammar_after: int | None = None
    ) -> list[list[Request]]:
        """A request for each sequence of each prompt. The first one with structured output takes seconds.

        Args:
            prompts: `Prompt`, one or several.
            sampling_params: `SamplingParams`, one for all or one for each; None is the default.
            grammar_after: The token behind which texts are to have the form that is asked for; None is from the
                beginning.

        Raises:
            ValueError: One of them cannot be served.
        """
        prompts = listed(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or self.default_params] * len(prompts)
        is_several = isinstance(sampling_params, Sequence)
        if not is_several or not all(isinstance(params, SamplingParams) for params in sampling_params):
            raise ValueError(f"`sampling_params` must be `SamplingParams`, or several. Got {sampling_params!r}.")
        if len(sampling_params) != len(prompts):
            raise ValueError(
                "`sampling_params` must be one for all prompts or one for each. "
                f"Got {len(sampling_params)} for {len(prompts)} prompts."
            )
        sampling_params = [without_bad_words(params, self._tokenizer) for params in sampling_params]
        ids = [
            self._truncated(self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, params)
            for (prompt, _), params in zip(prompts, sampling_params, strict=True)
        ]
        grammars = [
            params.structured_outputs and self._grammars.compile(params.structured_outputs)
            for params in sampling_params
        ]
        with self._lock:
            requests = [
                [
                    self._engine.make_request(
                        tokens, params.of_sequence(i), grammar=grammar and grammar.fork(grammar_after), cache_salt=salt
                    )
                    for i in range(params.n)
                ]
                for tokens, (_, salt), params, grammar in zip(ids, prompts, sampling_params, grammars, strict=True)
            ]
        if any(grammars):
            self._engine.prepare_structured()
        return requests

    def _tokenizer_json(self) -> tuple[str, int]:
        return self._tokenizer.to_json(), max(self._engine.vocab_size, self._tokenizer.vocab_size)

    def _truncated(self, prompt: Any, params: SamplingParams) -> Any:
        """The prompt's last tokens, as many as asked for; at most those that leave room for one token."""
        count = params.truncate_prompt_tokens
        if count is None or not isinstance(prompt, Sequence | np.ndarray):
            return prompt
        return prompt[-(self._engine.config.max_context_len - 1 if count == -1 else count) :]
