"""Fields of a config.json, read with a sentence for what is missing, wrong or not built."""

import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard


def with_defaults(config: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The fields that have a value. One that is absent has the default that Hugging Face gives it; null is no value."""
    return {name: value for name, value in (defaults | dict(config)).items() if value is not None}


def positive[Number: (int, float)](fields: Mapping[str, Any], name: str, kind: type[Number]) -> Number:
    """A field that must be there, finite and greater than 0.

    Raises:
        ValueError: It is not.
    """
    value = fields.get(name)
    if not _is_positive(value, kind):
        raise ValueError(f"`{name}` of the model's configuration must be {_NOUNS[kind]} above 0. Got {value!r}.")
    return kind(value)


def positive_or_none[Number: (int, float)](fields: Mapping[str, Any], name: str, kind: type[Number]) -> Number | None:
    """As `positive`; None where the field is absent."""
    return positive(fields, name, kind) if name in fields else None


def whole(fields: Mapping[str, Any], name: str) -> int:
    """A field that must be there, an integer and at least 0.

    Raises:
        ValueError: It is not.
    """
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"`{name}` of the model's configuration must be a whole number of at least 0. Got {value!r}.")
    return value


def positives(fields: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    """A field that must be a list of `count` finite numbers greater than 0.

    Raises:
        ValueError: It is not.
    """
    values = fields.get(name)
    if not isinstance(values, list) or len(values) != count or not all(_is_positive(value, float) for value in values):
        raise ValueError(
            f"`{name}` of the model's configuration must be a list of {count} finite numbers above 0. Got {values!r}."
        )
    return tuple(map(float, values))


def boolean(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A field that must be true or false where it is there: not a number, and not the words as a string.

    Raises:
        ValueError: It is not.
    """
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` of the model's configuration must be true or false. Got {value!r}.")
    return value


def refuse(fields: Mapping[str, Any], name: str, *, unless: Any, why: str = "") -> None:
    """Refuses a field that is there and asks for something else than what is built.

    Raises:
        NotImplementedError: It does.
    """
    value = fields.get(name, unless)
    if value != unless or isinstance(value, bool) != isinstance(unless, bool):
        raise NotImplementedError(f"`{name}` must be {_json(unless)}{why}. Got {_json(value)}.")


def _is_positive(value: Any, kind: type) -> TypeGuard[int | float]:
    allowed = int if kind is int else (int, float)
    return isinstance(value, allowed) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _json(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | None) else repr(value)


_NOUNS = {int: "an integer", float: "a finite number"}
