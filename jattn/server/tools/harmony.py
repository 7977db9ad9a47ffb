"""Harmony, the format of gpt-oss: messages in channels, of which some are thoughts, some calls and some the answer.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`; a call's header
names whom it goes to, `<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{...}<|call|>`.
"""

import re
from typing import Literal

from jattn.server.tools.events import CallArguments, CallName, Content, Event, Reasoning, merged
from jattn.server.tools.tags import TagFinder

START, CHANNEL, MESSAGE, CALL, RETURN = "<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>"
_ENDS = ("<|end|>", RETURN, CALL)
_TAGS = (START, CHANNEL, MESSAGE, "<|constrain|>", *_ENDS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_LONGEST_HEADER = 256  # in characters; a text that goes on without a tag has no header

_Kind = Literal["content", "reasoning", "call"]


class HarmonyParser:
    """Reads the text behind a prompt: the channel "analysis" is reasoning, others are content, and so is a text without
    messages. Messages of one kind are told apart by an end of line.

    Args:
        begun: What the prompt has of the message that the text goes on with, from `<|start|>` on.
        has_calls: Whether messages to functions are calls; else they are content.
    """

    def __init__(self, begun: str = "", *, has_calls: bool = True):
        self._has_calls = has_calls
        self._tags = TagFinder(*_TAGS)
        self._header = ""  # of a message that has not begun
        self._unread: str | None = ""  # what of it may be no header; None behind a tag
        self._kind: _Kind | None = None  # of the message; None within a header
        self._told: set[_Kind] = set()
        self._breaks = False  # whether an end of line goes before what the message says
        self._has_arguments = False
        self._num_calls = 0
        self._begin_within(begun)

    @property
    def to_answer(self) -> str:
        """What text must begin with to go on in the answer."""
        if self._kind is not None:
            return ""
        return f"{'' if self._header else START + 'assistant'}{CHANNEL}final{MESSAGE}"

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            certain, tag, text = self._tags.push(text)
            events += self._take_text(certain)
            if tag:
                events += self._take_tag(tag)
        return merged(events)

    def finish(self) -> list[Event]:
        events = self._take_text(self._tags.finish())
        return merged([*events, *(self._end() if self._kind is not None else self._no_header())])

    def _begin_within(self, begun: str) -> None:
        self.push(begun)
        self._take_text(self._tags.finish())
        self._kind = "content" if self._kind == "call" else self._kind  # whose name the prompt has
        self._told.clear()
        self._unread, self._breaks, self._num_calls = "", False, 0

    def _take_text(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._kind is None:
            room = max(0, _LONGEST_HEADER - len(self._header))  # tags may have taken more than there was
            text, rest = text[:room], text[room:]
            self._header += text
            if self._unread is not None:
                self._unread += text
            if not rest:
                return []
            self._kind = "content"
            return self._no_header() + self._take_text(rest)
        if self._kind == "call":
            self._has_arguments = True
            return [CallArguments(self._num_calls - 1, text)]
        self._told.add(self._kind)
        if self._breaks:
            text, self._breaks = "\n" + text, False
        return [Reasoning(text) if self._kind == "reasoning" else Content(text)]

    def _take_tag(self, tag: str) -> list[Event]:
        if self._kind is None and tag == MESSAGE:
            return self._begin()
        if self._kind is not None and tag not in (START, CHANNEL, *_ENDS):
            return self._take_text(tag)
        events = []
        if self._kind is not None:
            events = self._end()
        elif tag == START or tag in _ENDS:
            events = self._no_header()
        if tag in _ENDS:
            self._header, self._unread = "", ""
        else:
            self._header, self._unread = ("" if tag == START else self._header) + tag, None
        return events

    def _begin(self) -> list[Event]:
        """A message begins."""
        header, self._header, self._unread = self._header, "", None
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient and self._has_calls:
            self._kind, self._has_arguments = "call", False
            self._num_calls += 1
            return [CallName(self._num_calls - 1, recipient[1])]
        self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"
        self._breaks = self._kind in self._told
        return []

    def _end(self) -> list[Event]:
        """A message ends, if there is one."""
        lacks_arguments = self._kind == "call" and not self._has_arguments
        self._kind = None
        return [CallArguments(self._num_calls - 1, "{}")] if lacks_arguments else []

    def _no_header(self) -> list[Event]:
        """What stood where a header might, and has no tag before it, is content unless it is space."""
        text, self._header, self._unread = self._unread, "", None
        return [Content(text)] if text and text.strip() else []


def begun_in(prompt: str) -> str:
    """What a rendered prompt has of its last message."""
    place = prompt.rfind(START)
    return prompt[place:] if place >= 0 else ""
