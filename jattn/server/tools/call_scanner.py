"""Reads one call, a JSON object with a name and arguments, character by character."""

import json
from collections.abc import Callable
from typing import Literal

_ARGUMENTS = ("arguments", "parameters")


class JsonValue:
    """Finds where a value of JSON ends; what is no JSON it takes as it is."""

    def __init__(self):
        self._depth = 0
        self._in_string = self._is_escaped = False

    def take(self, char: str) -> Literal["part", "last", "behind"]:
        """Whether a character is a part of the value, its last one, or behind its end; no space comes before it."""
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
            return "part" if self._in_string or self._depth else "last"
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif self._depth == 0 and (char in ",}]" or char.isspace()):
            return "behind"
        elif char in "}]":
            self._depth -= 1
            return "part" if self._depth else "last"
        return "part"


class CallScanner:
    """Reads a call, `{"name": ..., "arguments": {...}}`, its keys in any order; `parameters` are arguments too.

    Args:
        on_name: Called with the name, once it is known.
        on_arguments: Called with pieces of the arguments as they stand there, after the name.

    Attributes:
        seen: All text of it so far.
        name: None until it is known.
        status: "open", "done" behind its last character, or "failed" where it turns out to be no call.
    """

    def __init__(self, on_name: Callable[[str], None], on_arguments: Callable[[str], None]):
        self.seen = ""
        self.name: str | None = None
        self.status: Literal["open", "done", "failed"] = "open"
        self._on_name, self._on_arguments = on_name, on_arguments
        self._state = self._begin
        self._key = self._raw = self._early = ""
        self._value = JsonValue()
        self._arguments_key: str | None = None

    def push(self, text: str) -> str:
        """Takes text up to the call's end.

        Returns:
            What follows it.
        """
        for i, char in enumerate(text):
            self.seen += char
            if not char.isspace() or self._state in (self._in_key, self._in_value):
                self._state(char)
            if self.status != "open":
                return text[i + 1 :]
        return ""

    def _begin(self, char: str) -> None:
        self._go(self._before_key, char == "{")

    def _before_key(self, char: str) -> None:
        self._raw, self._value = "", JsonValue()
        self._go(self._in_key, char == '"')
        self._in_key(char)

    def _in_key(self, char: str) -> None:
        self._raw += char
        if self._value.take(char) == "last":
            self._key = self._text_of_raw()
            self._state = self._before_colon

    def _before_colon(self, char: str) -> None:
        self._raw, self._value = "", JsonValue()
        self._go(self._before_value, char == ":")

    def _before_value(self, char: str) -> None:
        self._state = self._in_value
        if self._key in _ARGUMENTS and self._arguments_key is None:
            self._arguments_key = self._key
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        place = self._value.take(char)
        if place != "behind":
            self._raw += char
            if self._key == self._arguments_key:
                self._give(char)
        if place != "part":
            self._state = self._behind_value
            if self._key == "name" and self.name is None:
                self._take_name()
            if place == "behind" and self.status == "open" and not char.isspace():
                self._behind_value(char)

    def _behind_value(self, char: str) -> None:
        if char == "}" and self.name is not None:
            if self._arguments_key is None:
                self._on_arguments("{}")
            self.status = "done"
        else:
            self._go(self._before_key, char == ",")

    def _take_name(self) -> None:
        name = self._text_of_raw()
        if name:
            self.name = name
            self._on_name(name)
            self._give(self._early)
        else:
            self.status = "failed"

    def _give(self, text: str) -> None:
        if self.name is None:
            self._early += text
        else:
            self._on_arguments(text)

    def _text_of_raw(self) -> str:
        """The text that the raw JSON is; empty, and a failure, if it is none."""
        try:
            text = json.loads(self._raw)
        except ValueError:
            text = None
        if not isinstance(text, str):
            self.status = "failed"
            return ""
        return text

    def _go(self, state: Callable[[str], None], may: bool) -> None:
        self._state = state
        if not may:
            self.status = "failed"
