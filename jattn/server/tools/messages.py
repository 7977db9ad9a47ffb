"""Messages that tell of calls, as chat templates take them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jattn.server.bodies import shortened


def with_calls_for_templates(messages: Any) -> Any:
    """The messages, with arguments of calls as objects, texts that are missing as empty ones, and reasoning by both of
    its names; what is no message stays as it is.

    Raises:
        ValueError: The arguments of a call are no JSON object.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages
    return [_fitting(message) if isinstance(message, Mapping) else message for message in messages]


def _fitting(message: Mapping[str, Any]) -> dict[str, Any]:
    fitting = dict(message)
    if message.get("content") is None:
        fitting["content"] = ""
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        fitting |= {"reasoning": reasoning, "reasoning_content": reasoning}
    calls = message.get("tool_calls")
    if calls is None:
        fitting.pop("tool_calls", None)
    elif not isinstance(calls, list):
        raise ValueError(f"`tool_calls` of a message must be a list. Got {shortened(calls)}.")
    else:
        fitting["tool_calls"] = [_call(call) for call in calls]
        if reasoning and not fitting.get("content"):
            fitting["thinking"] = reasoning  # gpt-oss's templates take this before calls, and content in its place
    return fitting


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"Each of `tool_calls` must have a `function` with a `name`. Got {shortened(call)}.")
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        arguments = None
    if not isinstance(arguments, Mapping):
        raise ValueError(f"`arguments` of a call must be a JSON object. Got {shortened(function.get('arguments'))}.")
    return {**call, "function": {**function, "arguments": arguments}}
