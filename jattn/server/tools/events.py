"""What a text turns out to be, piece by piece: content, reasoning, and calls of tools."""

import dataclasses
import itertools
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Text of the thoughts before it."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallName:
    """The beginning of a message's call number `index`."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """A piece of the call's arguments, which are JSON if the model writes JSON."""

    index: int
    text: str


Event = Content | Reasoning | CallName | CallArguments


def merged(events: Iterable[Event]) -> list[Event]:
    """The events with neighbours of one kind joined and empty texts left out; any cuts of a text come to the same."""
    found: list[Event] = []
    for _, group in itertools.groupby(events, _kind):
        first, *others = group
        if isinstance(first, CallName):
            found += [first, *others]
        elif text := first.text + "".join(other.text for other in others if not isinstance(other, CallName)):
            found.append(dataclasses.replace(first, text=text))
    return found


def _kind(event: Event) -> tuple[type, int | None]:
    return type(event), event.index if isinstance(event, CallName | CallArguments) else None
