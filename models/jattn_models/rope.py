"""Rotary position embedding: frequencies from a configuration, and the angles of a pass."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jattn.rotary import Angles
from jattn_models.config_fields import positive, refuse, with_defaults
from jattn_models.rope_scaling import SCALINGS, DynamicScaling, LongRopeScaling, Scaling, YarnScaling

_READ_BY_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


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
            NotImplementedError: The type of scaling is not known, or does not read one of the fields.
        """
        fields = _rope_parameters(config)
        given = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **config, **fields}
        theta = positive(given, "rope_theta", float)
        rotary_dim = _rotary_dim(given, head_dim, partial)
        scaling = _scaling(fields)
        return cls(rotary_dim, theta, scaling and scaling.from_config(config, fields, rotary_dim // 2))

    def for_context(self, max_context_len: int) -> "Rope":
        """The embedding of a model that serves texts of so many tokens at most."""
        if not isinstance(self.scaling, DynamicScaling | LongRopeScaling):
            return self
        return dataclasses.replace(self, scaling=dataclasses.replace(self.scaling, context_len=max_context_len))

    def frequencies(self) -> np.ndarray:
        """Radians a token of each pair of dimensions, float32 [rotary_dim / 2]."""
        frequencies = self.theta ** -(np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim)
        return (self.scaling(frequencies) if self.scaling else frequencies).astype(np.float32)

    def angles(self, positions: Int[Array, " T"]) -> Angles:
        """Cosines and sines for absolute positions; once a pass, for all layers."""
        angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(self.frequencies())[None, :]
        return self.amplitude * jnp.cos(angles), self.amplitude * jnp.sin(angles)

    @property
    def logit_factor(self) -> float:
        """On q.k, where an architecture takes it from its rotary embedding."""
        return getattr(self.scaling, "logit_factor", 1.0)

    @property
    def amplitude(self) -> float:
        """On cosines and sines."""
        return self.scaling.amplitude if self.scaling else 1.0


def context_len(config: Mapping[str, Any]) -> int:
    """Positions that a model is made for, in tokens: `max_position_embeddings`, or more where its scaling reaches.

    Raises:
        ValueError: A field is missing or out of range.
    """
    own = positive(config, "max_position_embeddings", int)
    fields = _rope_parameters(config)
    of_full = fields.get("full_attention", fields)  # where each type of layer has its own
    if not isinstance(of_full, Mapping):
        return own
    scaling = next((each for name, each in SCALINGS.items() if name == _rope_type(of_full)), None)
    if scaling is DynamicScaling or scaling is YarnScaling:
        return max(own, scaling.reach(config, of_full))
    return own


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` or `rope_scaling`, without nulls; none of it where neither says anything."""
    names = ("rope_parameters", "rope_scaling")
    given = [value for name in names if (value := config.get(name)) is not None]
    if others := [value for value in given if not isinstance(value, Mapping)]:
        raise ValueError(f"`rope_parameters` or `rope_scaling` must be an object. Got {others[0]!r}.")
    spoken = [fields for value in given if (fields := with_defaults(value))]
    if len(spoken) == 2 and spoken[0] != spoken[1]:
        raise ValueError(f"`rope_parameters` and `rope_scaling` must not differ. Got {spoken[0]} and {spoken[1]}.")
    return spoken[0] if spoken else {}


def _scaling(fields: Mapping[str, Any]) -> type[Scaling] | None:
    """What `rope_type`, or `type` as it was once called, names; None for none.

    Raises:
        NotImplementedError: The type is not known, or there is a field that it does not read.
    """
    rope_type = _rope_type(fields)
    if rope_type not in ("default", *SCALINGS):
        raise NotImplementedError(f"`rope_type` must be one of default, {', '.join(SCALINGS)}. Got {rope_type!r}.")
    scaling = None if rope_type == "default" else SCALINGS[rope_type]
    read = _READ_BY_ALL + (scaling.read if scaling else ())
    if others := [name for name in fields if name not in read]:
        raise NotImplementedError(
            "`rope_parameters` must be one object for all layers and have only what its `rope_type` reads: "
            f"{rope_type!r} reads {', '.join(read)}. Got {others[0]!r}."
        )
    return scaling


def _rope_type(fields: Mapping[str, Any]) -> Any:
    return fields.get("rope_type", fields.get("type", "default"))


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
