"""Log-probabilities of prompts, by a step of its own behind a prefill: only the host knows whether any are wanted."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jattn.serving.plan import Chunk
from jattn.serving.request import Request
from jattn.serving.steps.logprobs import TokenLogprobs


class PromptPlace(NamedTuple):
    """A token of a prompt whose log-probability is asked for.

    Attributes:
        place: In the prompt.
        before: Where the launch has the token before it.
    """

    request: Request
    place: int
    before: int


class Score(NamedTuple):
    """Log-probabilities at some places.

    Attributes:
        logprobs: On the device, or on the host once they are read; place by place, then padding.
    """

    places: Sequence[PromptPlace]
    logprobs: TokenLogprobs


def scores_of(chunks: Sequence[Chunk], size: int, score: Callable[[np.ndarray], TokenLogprobs]) -> list[Score]:
    """What is asked for of a launch, `size` places at a time."""
    places = prompt_places(chunks)
    parts = [places[begin : begin + size] for begin in range(0, len(places), size)]
    return [Score(part, score(score_batch(part, size))) for part in parts]


def prompt_places(chunks: Sequence[Chunk]) -> list[PromptPlace]:
    """Places of prompts whose log-probabilities come with the chunks, each with the token before it."""
    found, begin = [], 0
    for chunk in chunks:
        request = chunk.request
        if request.params.prompt_logprobs is not None:
            places = range(chunk.start + 1, min(chunk.stop + 1, len(request.prompt)))
            found += [PromptPlace(request, place, i) for i, place in enumerate(places, begin)]
        begin += chunk.stop - chunk.start
    return found


def score_batch(places: Sequence[PromptPlace], size: int) -> np.ndarray:
    """What `Steps.score` takes, padded to `size`."""
    batch = np.zeros((size, 2), np.int32)
    for i, (request, place, before) in enumerate(places):
        batch[i] = before, request.prompt[place]
    return batch
