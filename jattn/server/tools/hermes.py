"""Calls as Hermes, Qwen2.5 and Qwen3 write them: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

from jattn.server.tools.parser import ToolParser
from jattn.server.tools.tags import TagFinder

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """See above; content may stand before, between and after the calls."""

    def __init__(self):
        super().__init__()
        self._begin, self._end = TagFinder(_BEGIN), TagFinder(_BEGIN, _END)

    def _outside(self, text: str) -> str:
        certain, tag, rest = self._begin.push(text)
        self._give_back(certain)
        if tag:
            self._begin_call(_BEGIN, self._closing)
        return rest

    def _closing(self, text: str) -> str:
        """Behind a call's object: what stands before the tag is nothing."""
        _, tag, rest = self._end.push(text)
        if tag == _BEGIN:
            self._begin_call(_BEGIN, self._closing)
        elif tag:
            self._state = self._outside
        return rest

    _broken = _closing

    def _held(self) -> str:
        return self._begin.finish()
