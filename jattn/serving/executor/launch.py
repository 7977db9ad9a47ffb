"""Launches under way, and what the host makes of them: tokens and log-probabilities as plain data."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jattn.parallel import NO_TOKEN
from jattn.serving.executor.scores import Score
from jattn.serving.executor.step_plans import StepKey
from jattn.serving.request import Request
from jattn.serving.steps.logprobs import Logprob, TokenLogprobs
from jattn.serving.steps.plain import UNUSED, StepOutput, Unsampled


@dataclasses.dataclass
class LaunchStats:
    """How host and device kept pace, since the engine was made.

    Attributes:
        launches: Steps that were enqueued.
        found_idle: Those that found the device idle though a step was under way: the host was late.
        waited_seconds: The host's wait for launches to run and their output to come.
    """

    launches: int = 0
    found_idle: int = 0
    waited_seconds: float = 0.0


class Given(NamedTuple):
    """What a launch gave one request.

    Attributes:
        tokens: In order; None, as the last, where the logits were not finite.
        logprobs: Of each token, by token id; None if not asked for.
        drafted, accepted: Tokens drafted for it, and how many of them are accepted; None where nothing drafts.
    """

    request: Request
    tokens: list[int | None]
    logprobs: list[dict[int, Logprob]] | None
    drafted: int | None = None
    accepted: int | None = None


@dataclasses.dataclass(frozen=True)
class Launch:
    """Tokens on their way to the host.

    Attributes:
        output: On the device, or on the host once it is read.
        requests: Whose token the output's row i is; None where the row yields none.
        scores: Log-probabilities of tokens of prompts, with their places in order.
    """

    output: StepOutput
    requests: Sequence[Request | None]
    scores: Sequence[Score] = ()

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Those of `scores`."""
        return [score.logprobs for score in self.scores]

    @property
    def has_run(self) -> bool:
        """Whether the device has done it; asking waits for nothing."""
        tokens: Any = self.output.tokens
        return tokens.is_ready()

    def read(self) -> "Launch":
        """The launch with its output on the host, once it has run."""
        output, logprobs = jax.device_get((self.output, self.logprobs))
        scores = [score._replace(logprobs=found) for score, found in zip(self.scores, logprobs, strict=True)]
        return dataclasses.replace(self, output=output, scores=scores)

    def given(self) -> Iterator[Given]:
        """What each request was given, but for those that have ended meanwhile; of a launch that is read."""
        output = self.output
        by_row = output.tokens.reshape(len(output.tokens), -1).tolist()
        drafts = None if output.drafts is None else output.drafts.tolist()
        for row, (request, tokens) in enumerate(zip(self.requests, by_row, strict=False)):
            if request is None or request.finished:
                continue
            begin = row * len(tokens)
            if UNUSED in tokens:
                tokens = tokens[: tokens.index(UNUSED)]
            logprobs = None
            if output.logprobs is not None and (count := request.params.logprobs) is not None:
                logprobs = [output.logprobs.at(place, token, count) for place, token in enumerate(tokens, begin)]
            if NO_TOKEN in tokens:
                tokens = [None if token == NO_TOKEN else token for token in tokens]
            yield Given(request, tokens, logprobs, *drafts[row]) if drafts else Given(request, tokens, logprobs)

    def prompt_logprobs(self) -> Iterator[tuple[Request, int, dict[int, Logprob]]]:
        """Requests, places of their prompts, and the log-probabilities there; of a launch that is read."""
        for places, logprobs in self.scores:
            for i, (request, place, _) in enumerate(places):
                yield request, place, logprobs.at(i, request.prompt[place], request.params.prompt_logprobs or 0)


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward pass under way, whose tokens are chosen once the host knows which may come.

    Attributes:
        output: What it leaves on the device.
        sample_key: The step that chooses.
        requests, scores: The launch's.
    """

    output: Unsampled
    sample_key: StepKey
    requests: Sequence[Request | None]
    scores: Sequence[Score]

    def sampled(self, output: StepOutput) -> Launch:
        """The launch, once its tokens are chosen."""
        return Launch(output, self.requests, self.scores)


def wait_for_all(launches: Sequence[Launch], forwards: Sequence[Forward]) -> None:
    """Returns once they have run, whether or not they failed."""
    for launch in [*launches, *forwards]:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready((launch.output, [score.logprobs for score in launch.scores]))
