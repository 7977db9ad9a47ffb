"""Calls as Mistral's models write them behind `[TOOL_CALLS]`: an array of objects, or names with arguments."""

import re

from jattn.server.tools.call_scanner import JsonValue
from jattn.server.tools.parser import ToolParser
from jattn.server.tools.tags import TagFinder

_TAG = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*")
_LONGEST_NAME = 256


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": ...}]` of the older ones, `[TOOL_CALLS]name{...}` of the newer."""

    def __init__(self):
        super().__init__()
        self._tag = TagFinder(_TAG)
        self._before = ""
        self._value = JsonValue()

    def _outside(self, text: str) -> str:
        certain, tag, rest = self._tag.push(text)
        self._give_back(certain)
        if tag:
            self._before, self._state = "", self._named
        return rest

    def _named(self, text: str) -> str:
        """Behind the tag, before the arguments."""
        for i, char in enumerate(text):
            if char == "[" and not self._before.strip():
                self._opening, self._before = _TAG + self._before, ""
                self._state = self._in_array
                return text[i:]
            if char == "{":
                return self._begin_arguments(text[i:])
            self._before += char
            if len(self._before) > _LONGEST_NAME:
                self._no_call()
                return text[i + 1 :]
        return ""

    def _begin_arguments(self, text: str) -> str:
        if found := _NAME.fullmatch(self._before):
            self._name(found[1])
            self._before, self._value, self._state = "", JsonValue(), self._in_arguments
        else:
            self._no_call()
        return text

    def _in_arguments(self, text: str) -> str:
        for i, char in enumerate(text):
            self._arguments(char)
            if self._value.take(char) == "last":
                self._state = self._outside
                return text[i + 1 :]
        return ""

    def _no_call(self) -> None:
        self._give_back(_TAG + self._before)
        self._before, self._state = "", self._outside

    def _held(self) -> str:
        is_begun = self._state == self._named
        return self._opening + (_TAG + self._before if is_begun else self._tag.finish())
