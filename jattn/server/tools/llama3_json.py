"""Calls as Llama 3 writes them: `{"name": ..., "parameters": ...}`, several with `;` between them."""

from jattn.server.tools.parser import ToolParser
from jattn.server.tools.tags import TagFinder

_TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """Calls are the whole text, or all behind `<|python_tag|>`; a text that begins otherwise has none before that."""

    def __init__(self):
        super().__init__()
        self._tag = TagFinder(_TAG)
        self._at_begin = True

    def _outside(self, text: str) -> str:
        if self._at_begin and text[0].isspace():
            self._give_back(text[0])
            return text[1:]
        if self._at_begin and text[0] == "{":
            self._at_begin = False
            self._begin_call("", self._between)
            return text
        self._at_begin = False
        certain, tag, rest = self._tag.push(text)
        self._give_back(certain)
        if tag:
            self._opening, self._state = tag, self._between
        return rest

    def _between(self, text: str) -> str:
        """Before a call, or behind one."""
        char, rest = text[0], text[1:]
        if char == "{":
            self._begin_call(self._opening, self._between)
            self._opening = ""
            return text
        if char.isspace() or char == ";":
            self._opening += char
            return rest
        self._give_back(self._opening)
        self._opening, self._state = "", self._outside
        return text

    def _held(self) -> str:
        is_between_calls = self._num_calls and not self._opening.startswith(_TAG)
        return ("" if is_between_calls else self._opening) + self._tag.finish()
