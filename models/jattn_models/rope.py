"""Rotary position embedding: frequencies from a configuration, and the angles of a pass."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jattn.rotary import Angles
from jattn_models.config_fields import positive, refuse
from jattn_models.rope_scaling import SCALINGS, Scaling


@dataclasses.dataclass(frozen=True)
class Rope:
    """What a model's configuration says about its rotary embedding; static and hashable.

    Attributes:
        rotary_dim: Dimensions of a head that turn; those after them stay.
    """

    rotary_dim: int
    theta: float
    scaling: Scaling | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int, *, partial: bool = False) -> "Rope":
        """Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

        Args:
            partial: Whether the architecture reads `partial_rotary_factor`, which lets a part of each head stay.

        Raises:
            ValueError: A field is missing or out of range.
            NotImplementedError: The type of scaling is not known.
        """
        fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(fields, Mapping):
            raise ValueError(f"`rope_parameters` or `rope_scaling` must be an object. Got {fields!r}.")
        given = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **config, **fields}
        theta = positive(given, "rope_theta", float)
        rotary_dim = _rotary_dim(given, head_dim, partial)
        rope_type = fields.get("rope_type") or fields.get("type") or "default"
        if rope_type == "default":
            return cls(rotary_dim, theta)
        if rope_type not in SCALINGS:
            raise NotImplementedError(f"`rope_type` must be one of default, {', '.join(SCALINGS)}. Got {rope_type!r}.")
        return cls(rotary_dim, theta, SCALINGS[rope_type].from_config(config, fields, rotary_dim // 2))

    def frequencies(self) -> np.ndarray:
        """Radians a token of each pair of dimensions, float32 [rotary_dim / 2]."""
        frequencies = self.theta ** -(np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim)
        return (self.scaling(frequencies) if self.scaling else frequencies).astype(np.float32)

    def angles(self, positions: Int[Array, " T"]) -> Angles:
        """Cosines and sines for absolute positions; once a pass, for all layers."""
        angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(self.frequencies())[None, :]
        return self.amplitude * jnp.cos(angles), self.amplitude * jnp.sin(angles)

    @property
    def amplitude(self) -> float:
        """On cosines and sines."""
        return self.scaling.amplitude if self.scaling else 1.0


def _rotary_dim(fields: Mapping[str, Any], head_dim: int, partial: bool) -> int:
    if head_dim % 2:
        raise ValueError(f"`head_dim` must be even for rotary embedding. Got {head_dim}.")
    if not partial:
        refuse(fields, "partial_rotary_factor", unless=1.0, why=": this architecture turns whole heads")
    factor = positive(fields, "partial_rotary_factor", float)
    rotary_dim = int(head_dim * factor)
    if factor > 1 or rotary_dim % 2 or rotary_dim == 0:
        raise ValueError(
            "`partial_rotary_factor` must be at most 1 and leave an even number of dimensions to turn. "
            f"Got {factor} of {head_dim}."
        )
    return rotary_dim
