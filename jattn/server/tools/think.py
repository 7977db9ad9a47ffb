"""Reasoning: what a model writes between `<think>` and `</think>` before its answer."""

from typing import Literal

from jattn.server.tools.events import Event, Reasoning, merged
from jattn.server.tools.parser import Parser
from jattn.server.tools.tags import TagFinder

BEGIN, END = "<think>", "</think>"


class ThinkParser:
    """Splits reasoning from an answer, which another parser reads.

    Args:
        answer: Reads what follows the reasoning.
        begins: Whether the text begins within reasoning, has none, or has some if it begins with the tag. The tag may
            stand there in any case.
    """

    def __init__(self, answer: Parser, begins: Literal["reasoning", "answer", "tag"]):
        self._answer = answer
        self._begins = begins
        self._state: Literal["begin", "reasoning", "answer"] = "answer" if begins == "answer" else "begin"
        self._beginning = ""
        self._end = TagFinder(END)

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._state == "begin":
            text = self._begun(text)
        if self._state == "reasoning":
            certain, tag, text = self._end.push(text)
            events.append(Reasoning(certain))
            if tag:
                self._state = "answer"
        if self._state == "answer":
            events += self._answer.push(text)
        return merged(events)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._state == "begin" and self._begins == "tag":
            events += self._answer.push(self._beginning)
        elif self._state == "begin":
            events.append(Reasoning(self._beginning))
        events.append(Reasoning(self._end.finish()))
        return merged([*events, *self._answer.finish()])

    def _begun(self, text: str) -> str:
        """Takes the beginning, up to where it shows what it is; gives back what is to be read then."""
        self._beginning += text
        begun = self._beginning.lstrip()
        if begun.startswith(BEGIN):
            self._state = "reasoning"
            return begun[len(BEGIN) :]
        if BEGIN.startswith(begun):
            return ""
        self._state = "reasoning" if self._begins == "reasoning" else "answer"
        return self._beginning


def begins_in(prompt: str, always: bool) -> Literal["reasoning", "answer", "tag"]:
    """Where the answer to a prompt begins.

    Args:
        prompt: Rendered; a template may have opened the reasoning there, or closed it.
        always: Whether the model thinks without being told.
    """
    opened, closed = prompt.rfind(BEGIN), prompt.rfind(END)
    if prompt.rstrip().endswith(END):
        return "answer"
    if prompt.rstrip().endswith(BEGIN) and opened > closed:
        return "reasoning"
    return "reasoning" if always else "tag"
