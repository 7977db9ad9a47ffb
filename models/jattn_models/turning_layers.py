"""Layers that turn queries and keys, as configurations list them."""

from collections.abc import Callable, Mapping
from typing import Any

from jattn_models.config_fields import positive


def turning(fields: Mapping[str, Any], num_layers: int) -> Callable[[int], bool]:
    """Layers that `no_rope_layers` has a 1 for; without it, all but one of each `no_rope_layer_interval`.

    Raises:
        ValueError: The list does not fit the layers.
    """
    given = fields.get("no_rope_layers", [])
    if not isinstance(given, list) or (given and len(given) < num_layers) or not all(flag in (0, 1) for flag in given):
        raise ValueError(f"`no_rope_layers` must be a list of {num_layers} times 0 or 1. Got {given!r}.")
    interval = positive(fields, "no_rope_layer_interval", int)
    return lambda layer: bool(given[layer]) if given else (layer + 1) % interval != 0
