"""Scalings of rotary frequencies, for contexts longer than those of a model's first training."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jattn_models.config_fields import boolean, positive, positives


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies slowed down, as in Llama 3.1.

    Attributes:
        factor: By how much the low frequencies are divided.
        low_freq_factor, high_freq_factor: Turns within the original context up to which a frequency counts as low, and
            from which it is left alone; it is blended between them.
        original_context_len: Tokens.
        amplitude: On cosines and sines.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int
    amplitude: ClassVar[float] = 1.0
    read: ClassVar = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], fields: Mapping[str, Any], num_frequencies: int) -> "Llama3Scaling":
        """Reads `rope_parameters` alone."""
        scaling = cls(
            factor=positive(fields, "factor", float),
            low_freq_factor=positive(fields, "low_freq_factor", float),
            high_freq_factor=positive(fields, "high_freq_factor", float),
            original_context_len=positive(fields, "original_max_position_embeddings", int),
        )
        if scaling.low_freq_factor > scaling.high_freq_factor:
            raise ValueError(
                "`low_freq_factor` must be at most `high_freq_factor`. "
                f"Got {scaling.low_freq_factor} and {scaling.high_freq_factor}."
            )
        return scaling

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_context_len * frequencies / (2 * np.pi)
        if self.low_freq_factor == self.high_freq_factor:  # Llama 4 Scout: nothing is between
            return np.where(turns >= self.low_freq_factor, frequencies, frequencies / self.factor)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """All frequencies slowed down alike.

    Attributes:
        factor: By which they are divided.
        amplitude: On cosines and sines.
    """

    factor: float
    amplitude: ClassVar[float] = 1.0
    read: ClassVar = ("factor",)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], fields: Mapping[str, Any], num_frequencies: int) -> "LinearScaling":
        """Reads `rope_parameters` alone."""
        return cls(positive(fields, "factor", float))

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """Each frequency slowed down by a factor of its own, as in Phi-3.

    There is one list of factors for texts within the original context and one for longer texts. transformers changes
    lists, and recomputes every key, when a text outgrows the original context; keys in pages stay as they were written.
    So the longest text that is served decides, as in vLLM: where it is longer than the original context, all texts take
    the long list.

    Attributes:
        short_factors, long_factors: By which each frequency is divided.
        original_context_len: Tokens.
        context_len: The longest text that is served, in tokens.
        amplitude: On cosines and sines; that of the model's own context, whatever is served of it.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context_len: int
    context_len: int
    amplitude: float
    read: ClassVar = (
        "short_factor",
        "long_factor",
        "original_max_position_embeddings",
        "factor",
        "attention_factor",
    )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], fields: Mapping[str, Any], num_frequencies: int
    ) -> "LongRopeScaling":
        """Reads `rope_parameters`, and both contexts from beside it."""
        context_len = positive(config, "max_position_embeddings", int)
        original = positive({**fields, **config}, "original_max_position_embeddings", int)
        short, long = (positives(fields, name, num_frequencies) for name in ("short_factor", "long_factor"))
        factor = positive({"factor": context_len / original, **fields}, "factor", float)
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
        amplitude = positive({"attention_factor": amplitude, **fields}, "attention_factor", float)
        return cls(short, long, original, context_len, amplitude)

    @property
    def factors(self) -> tuple[float, ...]:
        """Those of the list that serves."""
        return self.long_factors if self.context_len > self.original_context_len else self.short_factors

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / np.array(self.factors)


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    """Frequencies slowed down the more the lower they are, and the longer the longest text is (NTK-aware scaling).

    transformers goes by the longest text so far, and leaves keys as they are that it has; keys in pages are read by
    other texts too. So the longest text that is served decides, as with LongRoPE.

    Attributes:
        factor: How much longer than the model's own context texts may be.
        own_context_len: The model's own, in tokens.
        context_len: The longest text that is served, in tokens.
        amplitude: On cosines and sines.
    """

    factor: float
    own_context_len: int
    context_len: int
    amplitude: ClassVar[float] = 1.0
    read: ClassVar = ("factor",)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], fields: Mapping[str, Any], num_frequencies: int
    ) -> "DynamicScaling":
        """Reads `rope_parameters`, and the context from beside it."""
        own = positive(config, "max_position_embeddings", int)
        return cls(positive(fields, "factor", float), own, cls.reach(config, fields))

    @classmethod
    def reach(cls, config: Mapping[str, Any], fields: Mapping[str, Any]) -> int:
        """The longest text that it is for, in tokens."""
        return int(positive(config, "max_position_embeddings", int) * positive(fields, "factor", float))

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        growth = self.factor * max(self.context_len / self.own_context_len, 1.0) - (self.factor - 1)
        return frequencies * growth ** -(np.arange(len(frequencies)) / max(len(frequencies) - 1, 1))


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Low frequencies slowed down and high ones left alone, as YaRN does (arXiv:2309.00071); for texts of any length.

    Attributes:
        factor: By which low frequencies are divided.
        beta_fast, beta_slow: Turns within the original context from which a frequency is left alone, and up to which it
            is slowed down; it is blended between them, in steps of whole frequencies if `truncated`.
        original_context_len: Tokens.
        theta: Of the rotary embedding.
        amplitude: On cosines and sines.
        logit_factor: On q.k beside it, in the attention of DeepSeek's models.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_context_len: int
    theta: float
    truncated: bool
    amplitude: float
    logit_factor: float = 1.0
    read: ClassVar = (
        "factor",
        "beta_fast",
        "beta_slow",
        "original_max_position_embeddings",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], fields: Mapping[str, Any], num_frequencies: int) -> "YarnScaling":
        """Reads `rope_parameters`, and what of it may stand beside it."""
        given = {"beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 10000.0, **config, **fields}
        original, factor = cls._extension(config, fields)
        scales = {name: positive(fields, name, float) for name in ("mscale", "mscale_all_dim") if fields.get(name)}
        of_all = _yarn_amplitude(factor, scales.get("mscale_all_dim", 0.0))
        both = len(scales) == 2
        amplitude = _yarn_amplitude(factor, scales["mscale"]) / of_all if both else _yarn_amplitude(factor, 1.0)
        return cls(
            factor=factor,
            beta_fast=positive(given, "beta_fast", float),
            beta_slow=positive(given, "beta_slow", float),
            original_context_len=original,
            theta=positive(given, "rope_theta", float),
            truncated=boolean(fields, "truncate", default=True),
            amplitude=positive({"attention_factor": amplitude, **fields}, "attention_factor", float),
            logit_factor=of_all**2,
        )

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        count = len(frequencies)
        low, high = (self._number_of(turns, count) for turns in (self.beta_fast, self.beta_slow))
        if self.truncated:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * count - 1)
        slowed = np.clip((np.arange(count) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
        return slowed * frequencies / self.factor + (1 - slowed) * frequencies

    @classmethod
    def reach(cls, config: Mapping[str, Any], fields: Mapping[str, Any]) -> int:
        """The longest text that it is for, in tokens."""
        original, factor = cls._extension(config, fields)
        return int(original * factor)

    @staticmethod
    def _extension(config: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[int, float]:
        """The original context, in tokens, and by how much texts may be longer."""
        own = positive(config, "max_position_embeddings", int)
        given = {"original_max_position_embeddings": own, **config, **fields}
        original = positive(given, "original_max_position_embeddings", int)
        return original, positive({"factor": own / original, **given}, "factor", float)

    def _number_of(self, turns: float, count: int) -> float:
        """Which of `count` frequencies turns so often within the original context."""
        return count * math.log(self.original_context_len / (2 * math.pi * turns)) / math.log(self.theta)


def _yarn_amplitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


Scaling = LinearScaling | Llama3Scaling | DynamicScaling | LongRopeScaling | YarnScaling
SCALINGS = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "dynamic": DynamicScaling,
    "longrope": LongRopeScaling,
    "su": LongRopeScaling,
    "yarn": YarnScaling,
}
