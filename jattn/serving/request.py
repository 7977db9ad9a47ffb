"""Requests: what a caller asks for, and what the host knows of it while it is served."""

import dataclasses
import enum
from collections.abc import Hashable
from typing import Literal

from jattn.serving.sampling_params import SamplingParams as SamplingParams
from jattn.serving.sampling_params import token_ids as token_ids
from jattn.serving.steps.logprobs import Logprob
from jattn.serving.structured.grammar import Grammar

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(enum.Enum):
    NEW = enum.auto()
    WAITING = enum.auto()
    PREFILL = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclasses.dataclass(kw_only=True)
class DraftCounts:
    """What became of drafted tokens, of one request or of several.

    Attributes:
        steps: Decode steps, one for each request that took part.
        tokens: Tokens that came of them.
        drafted: Tokens that were drafted for them.
        accepted: Drafted tokens that are among those that came.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def note_step(self, tokens: int, drafted: int, accepted: int) -> None:
        """Counts a step of one request."""
        self.steps += 1
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafted tokens that were accepted; None if none was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a decode step gives a request, in the mean; None if there was no step."""
        return self.tokens / self.steps if self.steps else None


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """The host's record of one request; the scheduler moves it from status to status.

    Attributes:
        number: Order of arrival; earlier requests are never preempted for later ones.
        prompt: Token ids.
        limit: Tokens at most, prompt included.
        stop_ids: Tokens that end it.
        grammar: Which tokens may come next; None if any may.
        cache_salt: Requests share pages of the prefix cache with those alone that have the same one.
        generated: Tokens read back from the device so far.
        logprobs: Of each of them, by token id, if asked for.
        prompt_logprobs: Of the prompt's tokens but the first, by place and token id, as far as read; likewise.
        status: Where it stands.
        finish_reason: Why it ended; None before.
        row: Its row of the device's loop state while it has one.
        page_lists: Its pages in each of the pool's page lists, in order, 0 in the place of one that went back as no
            query sees it any more; empty while it has none.
        chain: What the prefix cache knows its first pages by (`jattn/page_cache.py`); empty while it has no pages.
        num_cached_tokens: Tokens of the prompt that were not computed for it, as their keys were in the pool; what it
            finds there after it has lost its pages does not count.
        num_computed: Tokens whose keys are in the pool once all launches so far have run; at least.
        num_unsure: Drafted tokens of launches not read yet: so many more keys there may be.
        num_preemptions: How often it lost its pages to earlier requests.
        drafts: What became of the tokens drafted for it; requests may share their counts.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int]
    grammar: Grammar | None = None
    cache_salt: str | None = None
    generated: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    prompt_logprobs: dict[int, dict[int, Logprob]] = dataclasses.field(default_factory=dict)
    status: RequestStatus = RequestStatus.NEW
    finish_reason: FinishReason | None = None
    row: int | None = None
    page_lists: list[list[int]] = dataclasses.field(default_factory=list)
    chain: list[Hashable] = dataclasses.field(default_factory=list)
    num_cached_tokens: int = 0
    num_computed: int = 0
    num_unsure: int = 0
    num_preemptions: int = 0
    drafts: DraftCounts = dataclasses.field(default_factory=DraftCounts)

    @property
    def pages(self) -> list[int]:
        """Its pages in the list that keeps all."""
        return self.page_lists[0] if self.page_lists else []

    @property
    def tokens(self) -> list[int]:
        """What a prefill must compute: the prompt, and what was generated before a preemption."""
        return self.prompt + self.generated

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def needs_full_steps(self) -> bool:
        """Whether steps that choose tokens and do no more cannot serve it."""
        return self.params.has_logit_rules or self.params.has_logprobs

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def error(self) -> str | None:
        """Why it ended by an error, in a sentence; None if it did not."""
        if self.finish_reason != "error":
            return None
        if self.grammar is not None:
            if told := self.grammar.failure:
                return f"The structured output cannot be followed after {self.num_tokens} tokens: {told}."
            return (
                f"No token may come after {self.num_tokens} tokens: the structured output that is asked for allows "
                "none of those that the request's other parameters do, or the model's logits are not finite."
            )
        return (
            f"The model's logits after {self.num_tokens} tokens are NaN or infinite: "
            "the weights are not finite, or the dtype is too narrow for them."
        )

    @property
    def at_limit(self) -> bool:
        """Whether the launches so far already yield the last token it may have."""
        return self.num_computed + 1 >= self.limit
