"""Layers that are not all alike: their kinds in order, cut into segments that can be scanned."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from jattn.page_lists import AttentionSpan

_MOST_LAYERS = 10_000  # that are looked at one by one
_LONGEST_PERIOD = 16  # layers that one scanned body unrolls

RopeName = Literal["global", "local"]


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What tells one layer of a model from another; static and hashable.

    Attributes:
        window_left: Keys to the left that a token sees, own one not counted; None for all.
        sparse: Whether its MLP is a mixture of experts.
        chunk_size: Tokens a chunk; a token sees the keys of its own one alone. None for no chunks.
        rope: Which of the model's rotary embeddings turns its queries and keys; None for none.
    """

    window_left: int | None = None
    sparse: bool = False
    chunk_size: int | None = None
    rope: RopeName | None = "global"

    @property
    def span(self) -> AttentionSpan:
        """How far back a token sees keys."""
        return AttentionSpan(self.window_left, self.chunk_size)


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive layers whose kinds repeat: a scan over periods, unrolled inside.

    Attributes:
        layers: Their numbers; a whole number of periods.
        period: The kinds of the first period's layers.
    """

    layers: range
    period: tuple[LayerKind, ...]

    @property
    def stacks(self) -> tuple[tuple[range, LayerKind], ...]:
        """For each place in the period the layers that stand there, stacked in the model, and their kind."""
        step = len(self.period)
        return tuple((self.layers[place::step], kind) for place, kind in enumerate(self.period))

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of one of the layers, by its number."""
        return self.period[(layer - self.layers.start) % len(self.period)]


def places_among(segments: Sequence[Segment]) -> tuple[tuple[range, ...], ...]:
    """For each segment and each place in its period the layers' numbers among all of the same span."""
    counts: dict[AttentionSpan, int] = {}
    places = []
    for segment in segments:
        turns, spans = len(segment.layers) // len(segment.period), [kind.span for kind in segment.period]
        begins = [counts.get(span, 0) + spans[:offset].count(span) for offset, span in enumerate(spans)]
        steps = [spans.count(span) for span in spans]
        places.append(tuple(range(a, a + step * turns, step) for a, step in zip(begins, steps, strict=True)))
        for span in dict.fromkeys(spans):
            counts[span] = counts.get(span, 0) + spans.count(span) * turns
    return tuple(places)


def alike(num_layers: int, kind: LayerKind | None = None) -> tuple[Segment, ...]:
    """All layers of one kind."""
    return (Segment(range(num_layers), (kind or LayerKind(),)),)


def segments(num_layers: int, kind_of: Callable[[int], LayerKind]) -> tuple[Segment, ...]:
    """Segments of layers of which each has its kind by number.

    From the first layer on, each segment is the longest that repeats; of equals, the one of the shortest period.

    Raises:
        ValueError: There are more layers than any model has.
    """
    if num_layers > _MOST_LAYERS:
        raise ValueError(
            f"`num_hidden_layers` must be at most {_MOST_LAYERS} where layers are not alike. Got {num_layers}."
        )
    kinds = tuple(kind_of(layer) for layer in range(num_layers))
    cut, start = [], 0
    while start < num_layers:
        left = kinds[start:]
        lengths = {1: _repeating(left, 1)}
        for period in range(2, _LONGEST_PERIOD + 1):
            length = _repeating(left, period)
            if length >= 2 * period:
                lengths[period] = length
        period = max(lengths, key=lambda period: lengths[period])
        cut.append(Segment(range(start, start + lengths[period]), left[:period]))
        start += lengths[period]
    return tuple(cut)


def _repeating(kinds: Sequence[LayerKind], period: int) -> int:
    """How many of the first layers are whole repetitions of the first `period`."""
    length = 0
    while length < len(kinds) and kinds[length] == kinds[length % period]:
        length += 1
    return length - length % period
