"""Bodies of requests: JSON objects within a limit, and fields of them with their types."""

import json
from typing import Any

from starlette.requests import Request

from jattn.server.errors import ApiError


async def read_object(request: Request, most_bytes: int) -> tuple[dict[str, Any], int]:
    """The JSON object that a request brings, and how many bytes it had; fields that are null are as if left out.

    Raises:
        ApiError: It is none (400), or longer than `most_bytes` (413).
    """
    length = request.headers.get("content-length", "")
    parts, size = [], int(length) if length.isdecimal() else 0
    if size <= most_bytes:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > most_bytes:
                break
            parts.append(part)
    if size > most_bytes:
        raise ApiError(413, f"The body of a request must have at most {most_bytes} bytes. Got more.")
    try:
        content = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body must be JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ApiError(400, f"The body must be a JSON object. Got {type(content).__name__}.")
    return {name: value for name, value in content.items() if value is not None}, size


def flag(body: dict[str, Any], name: str, default: bool = False) -> bool:
    return typed(body, name, bool, "true or false", default)


def typed(body: dict[str, Any], name: str, kind: type, rule: str, default: Any = None) -> Any:
    """A field of one JSON type.

    Raises:
        ValueError: It has another one.
    """
    value = body.get(name, default)
    if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ValueError(f"`{name}` must be {rule}. Got {shortened(value)}.")
    return value


def shortened(value: Any) -> str:
    """As it stands in a sentence."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
