"""An assistant's message in OpenAI's words, as a stream's deltas and whole."""

import secrets
import string
import uuid
from collections.abc import Sequence
from typing import Any

from jattn.server.tools.events import CallArguments, CallName, Content, Event, Reasoning
from jattn.server.tools.parser import Parser

_SHORT = string.ascii_letters + string.digits


class Message:
    """One choice's message, from its text.

    Args:
        parser: Reads the text.
        is_parallel: Whether it may have several calls; else those after the first are left out.
        short_ids: Whether calls are named by 9 letters and digits.
        includes_reasoning: Whether reasoning is told.
    """

    def __init__(
        self, parser: Parser, *, is_parallel: bool = True, short_ids: bool = False, includes_reasoning: bool = True
    ):
        self._parser = parser
        self._is_parallel = is_parallel
        self._short_ids = short_ids
        self._includes_reasoning = includes_reasoning
        self._content = self._reasoning = ""
        self._calls: list[dict[str, Any]] = []

    def push(self, text: str, *, is_last: bool = False) -> list[dict[str, Any]]:
        """The deltas that the next piece of the text comes to, and what was held back if it is the last."""
        events = self._parser.push(text) if text else []
        return [delta for event in events for delta in self._deltas(event)] + (self._finish() if is_last else [])

    def finish_reason(self, reason: str) -> str:
        """Why a message ends whose text ends for a reason."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    @property
    def whole(self) -> dict[str, Any]:
        """The message so far."""
        lacks_content = not self._content and (self._calls or self._reasoning)
        message = {"role": "assistant", "content": None if lacks_content else self._content, "refusal": None}
        if self._reasoning:
            message |= _reasoning(self._reasoning)
        return message | ({"tool_calls": self._calls} if self._calls else {})

    def _finish(self) -> list[dict[str, Any]]:
        return [delta for event in self._parser.finish() for delta in self._deltas(event)]

    def _deltas(self, event: Event) -> Sequence[dict[str, Any]]:
        match event:
            case Content(text):
                self._content += text
                return [{"content": text}]
            case Reasoning(text) if self._includes_reasoning:
                self._reasoning += text
                return [_reasoning(text)]
            case CallName(index, name) if index == 0 or self._is_parallel:
                call = {"id": self._new_id(), "type": "function", "function": {"name": name, "arguments": ""}}
                self._calls.append(call)
                return [{"tool_calls": [{"index": index, **call, "function": {**call["function"]}}]}]
            case CallArguments(index, text) if index == 0 or self._is_parallel:
                self._calls[index]["function"]["arguments"] += text
                return [{"tool_calls": [{"index": index, "function": {"arguments": text}}]}]
        return []

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(_SHORT) for _ in range(9))
        return f"call_{uuid.uuid4().hex}"


def _reasoning(text: str) -> dict[str, str]:
    """Under the name that vLLM gives it now, and under the older one."""
    return {"reasoning": text, "reasoning_content": text}
