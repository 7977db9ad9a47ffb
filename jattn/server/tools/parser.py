"""Parsers: state machines from a text to events; whatever the pieces of the text, the events come to the same."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jattn.server.tools.call_scanner import CallScanner
from jattn.server.tools.events import CallArguments, CallName, Content, Event, merged


@runtime_checkable
class Parser(Protocol):
    """Reads one text."""

    def push(self, text: str) -> list[Event]:
        """The events that the next piece makes certain."""
        ...

    def finish(self) -> list[Event]:
        """What was held back, as it is: no more text comes."""
        ...


class PlainParser:
    """A text that is all content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class ToolParser:
    """What parsers of calls have in common: they are in one state at a time, which takes text and gives back the rest.

    Space around calls is no content; what looked like a call and is none is content, to the letter.
    """

    def __init__(self):
        self._events: list[Event] = []
        self._num_calls = 0
        self._blank: str | None = ""  # space that no content has followed yet; None within content
        self._state: Callable[[str], str] = self._outside
        self._scanner: CallScanner | None = None
        self._before_call = ""
        self._behind_call: Callable[[str], str] = self._outside
        self._opening = ""  # of an array that has no call yet

    def push(self, text: str) -> list[Event]:
        while text:
            text = self._state(text)
        return self._taken()

    def finish(self) -> list[Event]:
        if self._scanner is not None and self._scanner.name is None:
            self._give_back(self._before_call + self._scanner.seen)
        self._give_back(self._held())
        if self._blank and not self._num_calls:
            self._events.append(Content(self._blank))
        return self._taken()

    def _outside(self, text: str) -> str:
        """Text outside of all calls."""
        raise NotImplementedError

    def _held(self) -> str:
        """Text that a state holds back."""
        return self._opening

    def _taken(self) -> list[Event]:
        events, self._events = merged(self._events), []
        return events

    def _give_back(self, text: str) -> None:
        """Notes content."""
        if self._blank is not None:
            text = self._blank + text
            self._blank = text if not text.strip() else None
        if self._blank is None:
            self._events.append(Content(text))

    def _begin_call(self, before: str, behind: Callable[[str], str]) -> None:
        """From here on a call is read.

        Args:
            before: What is content too if it is none.
            behind: The state after it.
        """
        self._scanner = CallScanner(self._name, self._arguments)
        self._before_call, self._behind_call = before, behind
        self._state = self._in_call

    def _in_call(self, text: str) -> str:
        scanner = self._scanner
        assert scanner is not None
        rest = scanner.push(text)
        if scanner.status == "open":
            return rest
        self._scanner, self._state = None, self._behind_call
        if scanner.status == "failed":
            if scanner.name is None:
                self._state = self._outside
                self._give_back(self._before_call + scanner.seen)
            else:
                self._state = self._broken
        return rest

    def _broken(self, text: str) -> str:
        """Behind where a call stopped being one: its rest means nothing."""
        return ""

    def _in_array(self, text: str) -> str:
        """Within an array of calls, between them."""
        char, rest = text[0], text[1:]
        if char == "{":
            self._begin_call(self._opening, self._in_array)
            self._opening = ""
            return text
        if char == "]" and self._num_calls:
            self._state = self._behind_array
        elif char.isspace() or char in "[,":
            self._opening += char if not self._num_calls else ""
        else:
            self._give_back(self._opening + char)
            self._opening, self._state = "", self._behind_array
        return rest

    def _behind_array(self, text: str) -> str:
        return self._outside(text)

    def _name(self, name: str) -> None:
        self._num_calls += 1
        self._blank = ""
        self._events.append(CallName(self._num_calls - 1, name))

    def _arguments(self, text: str) -> None:
        self._events.append(CallArguments(self._num_calls - 1, text))


class ArrayParser(ToolParser):
    """Calls as a JSON array, which is the whole text: what a grammar makes of `tool_choice` "required"."""

    def finish(self) -> list[Event]:
        if self._num_calls:  # a further call that was cut off before its name is nothing that anybody said
            self._scanner = None
        return super().finish()

    def _outside(self, text: str) -> str:
        return self._in_array(text)

    def _behind_array(self, text: str) -> str:
        self._give_back(text)
        return ""


class NamedParser:
    """A text that is the arguments of one call: what a grammar makes of a `tool_choice` that names a tool."""

    def __init__(self, name: str):
        self._begin: list[Event] = [CallName(0, name)]

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        events, self._begin = [*self._begin, CallArguments(0, text)], []
        return merged(events)

    def finish(self) -> list[Event]:
        return []
