"""Rotary embeddings of full and of sliding layers, where a configuration has one for each."""

from collections.abc import Mapping
from typing import Any


def rope_by_layer(fields: Mapping[str, Any], *, theta: Any, local_theta: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """`rope_parameters` of full and of sliding layers; in older files `rope_scaling` is of full layers alone.

    Args:
        fields: Without nulls.
        theta, local_theta: `rope_theta` of both where `rope_parameters` has none.

    Raises:
        ValueError: One of the fields is no object, or has other types of layers.
    """
    both = fields.get("rope_parameters", {})
    if (
        not isinstance(both, Mapping)
        or not both.keys() <= {"full_attention", "sliding_attention"}
        or not all(isinstance(part, Mapping | None) for part in both.values())
    ):
        raise ValueError(f"`rope_parameters` must be an object with one for each type of layer. Got {both!r}.")
    scaling = fields.get("rope_scaling", {})
    if not isinstance(scaling, Mapping):
        raise ValueError(f"`rope_scaling` must be an object. Got {scaling!r}.")
    full = {"rope_theta": theta} | dict(both.get("full_attention") or {}) | dict(scaling)
    return full, {"rope_theta": local_theta} | dict(both.get("sliding_attention") or {})
