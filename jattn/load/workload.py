"""What a server is asked in a benchmark: random prompts of random lengths, and how many come at a time."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Random prompts and how long their answers are, in tokens.

    Attributes:
        input_len: Of a prompt on the average, without what all prompts begin with.
        output_len: Of an answer on the average; no end token ends it earlier.
        spread: Lengths are drawn evenly from 1 - spread to 1 + spread times the average; 0 to 1.
        prefix_len: Of the beginning that all prompts share.
        vocab_size: Ids are drawn below it.
        seed: Of all that is drawn.

    Raises:
        ValueError: A number is out of its range.
    """

    input_len: int = 1024
    output_len: int = 128
    spread: float = 0.0
    prefix_len: int = 0
    vocab_size: int = 1000
    seed: int = 0

    def __post_init__(self):
        for name, least in {"input_len": 1, "output_len": 1, "prefix_len": 0, "vocab_size": 1, "seed": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}. Got {getattr(self, name)}.")
        if not 0 <= self.spread <= 1:
            raise ValueError(f"`spread` must be a number from 0 to 1. Got {self.spread}.")

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer at most."""
        return self.prefix_len + self._most(self.input_len) + self._most(self.output_len)

    def prompts(self, count: int) -> list[tuple[list[int], int]]:
        """Token ids of each prompt, and the tokens of its answer."""
        rng = np.random.default_rng(self.seed)
        shared = rng.integers(self.vocab_size, size=self.prefix_len).tolist()
        inputs, outputs = self._lengths(rng, self.input_len, count), self._lengths(rng, self.output_len, count)
        return [
            (shared + rng.integers(self.vocab_size, size=num_in).tolist(), num_out)
            for num_in, num_out in zip(inputs, outputs, strict=True)
        ]

    def _most(self, mean: int) -> int:
        return math.floor(mean * (1 + self.spread))

    def _lengths(self, rng: np.random.Generator, mean: int, count: int) -> list[int]:
        least = max(1, math.ceil(mean * (1 - self.spread)))
        return rng.integers(least, self._most(mean), size=count, endpoint=True).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """How requests come: so many at a time, each followed by the next (closed loop), or at a rate (open loop).

    Attributes:
        num_prompts: Requests in all.
        concurrency: At a time; None in an open loop.
        rate: Requests a second, with the random gaps of a Poisson process; infinite sends all at once. None in a
            closed loop.

    Raises:
        ValueError: A number is out of its range, or neither or both of the last two are given.
    """

    num_prompts: int
    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self):
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("`concurrency` or `rate` must be given, and not both.")
        if self.num_prompts < 1 or (self.concurrency is not None and self.concurrency < 1):
            raise ValueError(f"`num_prompts` and `concurrency` must be at least 1. Got {self}.")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"`rate` must be a number above 0, or inf. Got {self.rate}.")

    @property
    def name(self) -> str:
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} a second"

    def gaps(self, seed: int) -> list[float]:
        """Seconds between the requests of an open loop."""
        assert self.rate is not None
        if math.isinf(self.rate):
            return [0.0] * self.num_prompts
        return np.random.default_rng(seed).exponential(1 / self.rate, self.num_prompts).tolist()
