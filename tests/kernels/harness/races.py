"""JAX's search for races, of an access among all earlier ones of its buffer at once.

Pair by pair, in Python, it takes most of the time of a kernel whose result is written in many pieces.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import race_detection_state as of_pairs
from jax._src.pallas.mosaic_gpu.interpret import race_detection_state as of_gpus

Kind = Literal["read", "write"]


class Access(NamedTuple):
    """Of a part of a buffer, by a thread.

    Attributes:
        clock: What the thread knows of: how far itself and each other has come.
        places: Where the part begins in each axis, then where it ends.
        told: The thread, the part and the line, for whoever reads of a race.
    """

    clock: np.ndarray
    places: np.ndarray
    told: tuple[Any, Any, Any]

    def __str__(self) -> str:
        thread, rnge, source_info = self.told
        where = "" if source_info is None else f", {source_info_util.summarize(source_info)}"
        return f"of {rnge} from {thread}{where}, clock {self.clock}"


class Record:
    """The accesses of one kind of one buffer."""

    def __init__(self) -> None:
        self.accesses: list[Access] = []
        self._clocks = self._places = np.empty((0, 0), np.int64)

    def add(self, access: Access) -> None:
        """Puts it at the end."""
        count = len(self.accesses)
        if count == len(self._clocks):
            self._clocks = _with_more_rows(self._clocks, access.clock.size)
            self._places = _with_more_rows(self._places, access.places.size)
        self._clocks[count], self._places[count] = access.clock, access.places
        self.accesses.append(access)

    def so_far(self) -> tuple[np.ndarray, np.ndarray]:
        """The clocks and the places of those that are there: more of them change nothing of it."""
        return self._clocks[: len(self.accesses)], self._places[: len(self.accesses)]


def _with_more_rows(rows: np.ndarray, columns: int) -> np.ndarray:
    return np.concatenate([rows.reshape(len(rows), columns), np.empty((max(16, len(rows)), columns), np.int64)])


def first_in_race(clocks: np.ndarray, places: np.ndarray, access: Access) -> int | None:
    """The number of the first that touches what the access does and is neither before nor after it."""
    if not len(clocks):
        return None
    (starts, stops), (start, stop) = np.split(places, 2, axis=1), np.split(access.places, 2)
    overlap = ((starts <= start) & (start < stops)) | ((start <= starts) & (starts < stop))
    touching = np.flatnonzero(overlap.all(axis=1))
    # Clocks of which neither is larger are of no order, and so are equal ones.
    before = (clocks[touching] <= access.clock).all(axis=1)
    after = (clocks[touching] >= access.clock).all(axis=1)
    racing = touching[before == after]
    return int(racing[0]) if len(racing) else None


@dataclasses.dataclass
class _AtOnce(of_pairs.RaceDetectionState):
    records: dict[tuple[Kind, Any], Record] = dataclasses.field(default_factory=lambda: collections.defaultdict(Record))

    def check_read(self, thread, clock, buffer_key, rnge, source_info=None):
        access = Access(clock.clock, _places(rnge), (thread, rnge, source_info))
        self._check("read", access, buffer_key, ("write",))

    def check_write(self, thread, clock, buffer_key, rnge, source_info=None):
        access = Access(clock.clock, _places(rnge), (thread, rnge, source_info))
        self._check("write", access, buffer_key, ("write", "read"))

    def _check(self, kind: Kind, access: Access, buffer_key: Any, others: Sequence[Kind]) -> None:
        with self.lock:
            earlier = [self.records[other, buffer_key].so_far() for other in others]
            self.records[kind, buffer_key].add(access)
        for other, (clocks, places) in zip(others, earlier, strict=True):
            number = first_in_race(clocks, places, access)
            if number is not None:
                of_other = self.records[other, buffer_key].accesses[number]
                print(f"RACE DETECTED in {buffer_key}\n  {kind} {access}\n  {other} {of_other}\n")
                self.races_found = True


@dataclasses.dataclass
class GPURaceDetectionState(of_gpus.GPURaceDetectionState, _AtOnce):
    """In the place of JAX's: between that and its base class stands the search at once."""


def _places(rnge: Any) -> np.ndarray:
    slices = [slice(each, each + 1) if isinstance(each, int) else each for each in rnge]
    assert all(each.step in (1, None) for each in slices)
    return np.array([*(each.start for each in slices), *(each.stop for each in slices)], np.int64)
