"""Sharding: which part of a leaf one of several devices holds, and where it lies in the whole.

Column-parallel and row-parallel projections as in Megatron-LM (arXiv:1909.08053): where outputs are split, each device
has its part of every block that lies side by side in a kernel (queries, keys and values; gate and up); where inputs
are, it has consecutive rows. Experts may be split by number instead, each one whole.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

Sharded = Literal["outputs", "inputs", "heads", "experts"] | None  # heads and experts: the first axis
_AXES = {"outputs": -1, "inputs": -2}


@dataclasses.dataclass(frozen=True)
class Rank:
    """One of `size` devices; the only one by default."""

    number: int = 0
    size: int = 1

    def __post_init__(self):
        if not 0 <= self.number < self.size:
            raise ValueError(
                f"`rank` must be at least 0 and below the number of devices. Got {self.number} of {self.size}."
            )

    def part(self, everything: range) -> range:
        """The device's share of numbers."""
        size = len(everything) // self.size
        return everything[self.number * size : (self.number + 1) * size]


ONLY_RANK = Rank()


def whole_shape(shape: tuple[int, ...], sharded: Sharded, size: int) -> tuple[int, ...]:
    """The shape of a leaf on one device, given the shape of each of `size` devices' share."""
    if sharded is None:
        return shape
    axis = _axis(sharded, len(shape))
    return (*shape[:axis], shape[axis] * size, *shape[axis + 1 :])


def pieces(
    shape: tuple[int, ...], blocks: tuple[int, ...], sharded: Sharded, rank: Rank, unit: int = 1
) -> Iterator[tuple[slice, ...]]:
    """What lies side by side, along the last axis, in a device's share of an array.

    Args:
        shape: Of the whole array, [..., inputs, outputs].
        blocks: Widths of what is split by itself; together the last axis.
        unit: Outputs that are never split, a head's: where a block has fewer units than there are devices, several
            devices have one and the same.
    """
    assert sum(blocks) == shape[-1], f"{blocks} do not fill {shape}"
    everything = [slice(0, length) for length in shape]
    if sharded is None or rank.size == 1:
        yield tuple(everything)
        return
    axis, start = _axis(sharded, len(shape)), 0
    for width in blocks if sharded == "outputs" else (shape[axis],):
        units = width // unit if sharded == "outputs" else width
        alike = max(units, rank.size) % min(units, rank.size) == 0
        assert alike, "the model's constructor refuses what does not divide"
        part = width // min(units, rank.size)
        first = start + rank.number * units // rank.size * (width // units)
        everything[axis] = slice(first, first + part)
        yield tuple(everything)
        start += width


def _axis(sharded: Sharded, count: int) -> int:
    """Which of so many axes is split."""
    return count + _AXES[sharded] if sharded in _AXES else 0
