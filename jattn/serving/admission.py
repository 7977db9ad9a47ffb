"""Admission: which requests an engine can serve, said before they are queued."""

import dataclasses
from typing import Any

from jattn.serving.request import Request, SamplingParams, token_ids
from jattn.serving.resolved_config import ResolvedConfig
from jattn.serving.structured.grammar import Grammar


@dataclasses.dataclass(frozen=True)
class Admission:
    """The bounds of one engine's requests, but for the pool's, which the scheduler knows.

    Attributes:
        vocab_size: Of the model.
        eos_token_ids: Tokens that end any request that does not ignore them.
    """

    config: ResolvedConfig
    vocab_size: int
    eos_token_ids: frozenset[int]

    @property
    def max_logprobs(self) -> int:
        """Likeliest tokens whose log-probabilities a request may ask for."""
        return min(self.config.max_logprobs, self.vocab_size)

    def make_request(
        self,
        number: int,
        prompt: Any,
        params: SamplingParams,
        *,
        grammar: Grammar | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        """A request within the bounds.

        Raises:
            ValueError: One is passed; the message says which.
        """
        config = self.config
        if params.bad_words:
            raise ValueError(f"`bad_words` need a tokenizer, which `LLM` has. Got {params.bad_words!r}.")
        if params.structured_outputs is not None and config.batch_invariant:
            raise ValueError(
                "`structured_outputs` must be None where `batch_invariant` is True: what is served beside them would "
                f"take other steps. Got {params.structured_outputs!r}."
            )
        if params.structured_outputs is not None and grammar is None:
            raise ValueError(
                f"`structured_outputs` need a tokenizer, which `LLM` has. Got {params.structured_outputs!r}."
            )
        params = _with_whole_vocabulary(params, self.vocab_size)
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise ValueError(f"`cache_salt` must be None or a text that is not empty. Got {cache_salt!r}.")
        prompt = list(token_ids(prompt, "Token ids", self.vocab_size))
        if not prompt:
            raise ValueError("A prompt must have at least one token.")
        if len(prompt) >= config.max_context_len:
            raise ValueError(
                f"A prompt must leave room for a token in the context of {config.max_context_len} tokens. "
                f"Got a prompt of {len(prompt)}."
            )
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        if len(stop_ids) > config.max_stop_ids:
            raise ValueError(
                f"A request may have {config.max_stop_ids} stop tokens, the model's own included. Got {len(stop_ids)}."
            )
        request = Request(
            number=number,
            prompt=prompt,
            params=params,
            limit=min(len(prompt) + (params.max_tokens or config.max_context_len), config.max_context_len),
            stop_ids=stop_ids,
            grammar=grammar,
            cache_salt=cache_salt,
        )
        self._check_full(request)
        return request

    def _check_full(self, request: Request) -> None:
        """Says whether the full steps can do what a request asks of them."""
        config, params = self.config, request.params
        if request.needs_full_steps and not config.full_sampling:
            raise ValueError(
                "Penalties, `logit_bias`, `allowed_token_ids`, `bad_words`, `min_tokens`, `logprobs` and "
                f"`prompt_logprobs` need an engine with `full_sampling`. Got full_sampling={config.full_sampling}."
            )
        bias = params.logit_bias or {}
        token_ids(bias, "The token ids of `logit_bias`", self.vocab_size)
        allowed = token_ids(params.allowed_token_ids or (), "`allowed_token_ids`", self.vocab_size)
        for name, tokens in (("logit_bias", bias), ("allowed_token_ids", set(allowed))):
            if len(tokens) > config.max_logit_bias:
                raise ValueError(f"`{name}` must have at most {config.max_logit_bias} tokens. Got {len(tokens)}.")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.max_logprobs:
                raise ValueError(f"`{name}` must be at most {self.max_logprobs}. Got {getattr(params, name)}.")


def _with_whole_vocabulary(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """The parameters with the vocabulary's size where they ask for all of its log-probabilities."""
    asked = {name: vocab_size for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1}
    return dataclasses.replace(params, **asked) if asked else params
