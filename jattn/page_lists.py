"""Page lists: the pages of a sequence that layers of one attention span keep, apart from those of other layers.

Every pool has the list that keeps all pages. Layers that see no further back than a window or a chunk may have another
one, of fewer pages: a page goes back to it once no query to come sees its keys, and page 0, which nobody writes, takes
its place in the sequence's table, so that positions stay what they are.
"""

import dataclasses
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class AttentionSpan:
    """How far back a layer's queries see keys; static and hashable.

    Attributes:
        window_left: Keys to the left, own one not counted; None for all.
        chunk_size: Tokens a chunk; a query sees the keys of its own one alone. None for no chunks.
    """

    window_left: int | None = None
    chunk_size: int | None = None

    @property
    def most_keys(self) -> int:
        """Keys that a query sees at most; sys.maxsize if there is no bound."""
        window = sys.maxsize if self.window_left is None else self.window_left + 1
        return min(window, self.chunk_size or sys.maxsize)

    def first_page(self, position: Any, page_size: int) -> Any:
        """The first page whose keys a query at a position may see; 0 or less where it sees them all.

        Args:
            position: An int, or an array of them.
        """
        if self.window_left is not None:
            return (position - self.window_left) // page_size
        if self.chunk_size is not None:
            return position // self.chunk_size * self.chunk_size // page_size
        return 0


ALL_KEYS = AttentionSpan()


class WindowList(NamedTuple):
    """A page list beside the one that keeps all pages.

    Attributes:
        span: Of its layers.
        num_pages: Its pages, the reserved page 0 included.
    """

    span: AttentionSpan
    num_pages: int


def narrower_spans(spans: Iterable[AttentionSpan], num_tokens: int) -> tuple[AttentionSpan, ...]:
    """Of the spans of a model's layers those that have a list beside the one that keeps all pages, each once.

    That one has the layers that see farthest, and all that see a sequence of `num_tokens` whole.
    """
    spans = tuple(spans)
    farthest = max((span.most_keys for span in spans), default=0)
    return tuple(dict.fromkeys(span for span in spans if span.most_keys < min(farthest, num_tokens)))
