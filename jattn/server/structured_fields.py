"""Fields of a completion that say what its text must look like: OpenAI's `response_format`, `structured_outputs`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.server.bodies import shortened, typed
from jattn.serving.structured.params import StructuredOutputsParams

_NAMES = tuple(field.name for field in dataclasses.fields(StructuredOutputsParams))


def asks_for_structure(body: Mapping[str, Any]) -> bool:
    """Whether a body may ask for what takes long to compile."""
    return any(body.get(name) for name in ("structured_outputs", "response_format", "tools"))


def structured_outputs(body: dict[str, Any]) -> StructuredOutputsParams | None:
    """What a body says of its text's form; None if it says nothing.

    Raises:
        ValueError: A field is not what it should be, or both say something.
    """
    given = typed(body, "structured_outputs", dict, "an object", {})
    if unknown := [name for name in given if name not in _NAMES]:
        raise ValueError(f"`structured_outputs` may have the fields {', '.join(_NAMES)}. Got {shortened(unknown[0])}.")
    given = {name: value for name, value in given.items() if value is not None}
    given |= _of_response_format(typed(body, "response_format", dict, "an object", {}))
    return StructuredOutputsParams(**given) if given else None


def _of_response_format(response_format: dict[str, Any]) -> dict[str, Any]:
    kind = response_format.get("type")
    if kind == "text" or not response_format:
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        named = typed(response_format, "json_schema", dict, "an object", {})
        if not isinstance(named.get("schema"), dict):
            raise ValueError(f"`json_schema` must have a `schema`, which is an object. Got {shortened(named)}.")
        return {"json": named["schema"]}
    raise ValueError(f"`response_format` must have the type text, json_object or json_schema. Got {shortened(kind)}.")
