"""Rotary position embedding: frequencies from a configuration, angles of a pass, and the half rotation."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from jattn_models.config_fields import positive

Angles = tuple[Float32[Array, "T half"], Float32[Array, "T half"]]  # cosines and sines


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Frequencies slowed down for contexts longer than those of the first training, as in Llama 3.1.

    Attributes:
        factor: By how much the low frequencies are divided.
        low_freq_factor, high_freq_factor: Turns within the original context up to which a frequency counts as low, and
            from which it is left alone; it is blended between them.
        original_context_len: Tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_context_len * frequencies / (2 * np.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Rope:
    """What a model's configuration says about its rotary embedding; static and hashable."""

    head_dim: int
    theta: float
    scaling: Llama3Scaling | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> "Rope":
        """Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

        Raises:
            ValueError: A field is missing or out of range.
            NotImplementedError: The type of scaling is not known.
        """
        if head_dim % 2:
            raise ValueError(f"`head_dim` must be even for rotary embedding. Got {head_dim}.")
        fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(fields, Mapping):
            raise ValueError(f"`rope_parameters` or `rope_scaling` must be an object. Got {fields!r}.")
        theta = positive({"rope_theta": 10000.0, **config, **fields}, "rope_theta", float)
        rope_type = fields.get("rope_type") or fields.get("type") or "default"
        if rope_type == "default":
            return cls(head_dim, theta)
        if rope_type != "llama3":
            raise NotImplementedError(f"`rope_type` must be 'default' or 'llama3'. Got {rope_type!r}.")
        scaling = Llama3Scaling(
            factor=positive(fields, "factor", float),
            low_freq_factor=positive(fields, "low_freq_factor", float),
            high_freq_factor=positive(fields, "high_freq_factor", float),
            original_context_len=positive(fields, "original_max_position_embeddings", int),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise ValueError(
                "`low_freq_factor` must be less than `high_freq_factor`. "
                f"Got {scaling.low_freq_factor} and {scaling.high_freq_factor}."
            )
        return cls(head_dim, theta, scaling)

    def frequencies(self) -> np.ndarray:
        """Radians a token of each pair of dimensions, float32 [head_dim / 2]."""
        frequencies = self.theta ** -(np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)
        return (self.scaling(frequencies) if self.scaling else frequencies).astype(np.float32)

    def angles(self, positions: Int[Array, " T"]) -> Angles:
        """Cosines and sines for absolute positions; once a pass, for all layers."""
        angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(self.frequencies())[None, :]
        return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "T heads H"], angles: Angles) -> Float[Array, "T heads H"]:
    """Turns each pair (i, i + H / 2) of a head by its angle, in float32."""
    cos, sin = (part[:, None, :] for part in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
