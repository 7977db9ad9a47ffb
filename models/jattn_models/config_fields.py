"""Fields of a config.json, read with a sentence for what is missing or wrong."""

import math
from collections.abc import Mapping
from typing import Any


def positive[Number: (int, float)](fields: Mapping[str, Any], name: str, kind: type[Number]) -> Number:
    """A field that must be there, finite and greater than 0.

    Raises:
        ValueError: It is not.
    """
    value = fields.get(name)
    allowed = int if kind is int else (int, float)
    if not isinstance(value, allowed) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"`{name}` of the model's configuration must be {_NOUNS[kind]} above 0. Got {value!r}.")
    return kind(value)


_NOUNS = {int: "an integer", float: "a finite number"}
