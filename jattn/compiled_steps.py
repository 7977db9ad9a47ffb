"""Compiled steps: one executable a bucket, made ahead of time and replayed; what CUDA graphs are elsewhere."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step still to be compiled.

    Attributes:
        function: Pure function of arrays.
        arguments: Example arguments; only shapes and dtypes matter (`jax.ShapeDtypeStruct` will do).
        donate: Positions of the arguments whose memory the step may reuse.
        unrolled: Whether a GPU runs every loop of known length, and those inside it, two turns at a time, or all where
            devices share the step: for one so short that launching it counts, and whose loops do not multiply.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    unrolled: bool = False

    def without_arrays(self) -> "StepPlan":
        """The same plan of shapes alone, which holds no memory and outlives arrays that are donated."""
        return dataclasses.replace(self, arguments=jax.tree.map(described, self.arguments))

    @property
    def devices(self) -> tuple[Any, ...]:
        """Those that its arguments are tied to, in their order; JAX's default where they are tied to none."""
        for leaf in jax.tree.leaves(self.arguments):
            sharding = described(leaf).sharding
            if isinstance(sharding, NamedSharding):
                mesh: Any = sharding.mesh
                return tuple(mesh.devices.flat)
            if sharding is not None:
                return tuple(sharding.device_set)
        return tuple(jax.device_put(0).devices())


def described(leaf: Any) -> jax.ShapeDtypeStruct:
    """An argument's shape, and where it lies if it is tied to devices."""
    is_tied = getattr(leaf, "committed", isinstance(leaf, jax.ShapeDtypeStruct))
    sharding = leaf.sharding if is_tied else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False))


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """How a step came to be.

    Attributes:
        seconds: Of tracing, lowering and compiling it, or of loading it.
        loaded: Whether it was on disk.
    """

    seconds: float
    loaded: bool


class CompiledSteps:
    """Executables by key. A call never compiles: another shape, dtype or key is an error.

    Attributes:
        records: How each came to be, as far as known.
    """

    def __init__(
        self,
        executables: Mapping[Hashable, jax.stages.Compiled],
        records: Mapping[Hashable, StepRecord] | None = None,
    ):
        self._executables = dict(executables)
        self.records = dict(records or {})

    @property
    def temporary_bytes(self) -> int:
        """What the step that needs most needs of the device beside its arguments and results; 0 where none says."""
        found = (step.memory_analysis() for step in self._executables.values())
        return max((analysis.temp_size_in_bytes for analysis in found if analysis is not None), default=0)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._executables

    def __getitem__(self, key: Hashable) -> jax.stages.Compiled:
        """The executable of a bucket.

        Raises:
            KeyError: The bucket was not compiled; the message lists those that were.
        """
        if key not in self._executables:
            raise KeyError(f"No step was compiled for {key}. Compiled: {', '.join(map(str, self._executables))}.")
        return self._executables[key]

    def __or__(self, other: "CompiledSteps") -> "CompiledSteps":
        """These and others, which replace those of the same keys."""
        return CompiledSteps(self._executables | other._executables, self.records | other.records)

    def in_order_of(self, keys: Iterable[Hashable]) -> "CompiledSteps":
        """Those of these keys that there are."""
        there = [key for key in keys if key in self]
        return CompiledSteps(
            {key: self._executables[key] for key in there},
            {key: self.records[key] for key in there if key in self.records},
        )

    def __call__(self, key: Hashable, *arguments: Any) -> Any:
        return self[key](*arguments)


def smallest_bucket(buckets: Iterable[int], size: int) -> int:
    """The smallest bucket that holds `size`.

    Raises:
        ValueError: None does.
    """
    holding = [bucket for bucket in buckets if bucket >= size]
    if not holding:
        raise ValueError(f"`size` must fit the largest bucket. Got {size}, buckets {sorted(buckets)}.")
    return min(holding)


def power_of_two_buckets(largest: int, smallest: int = 1) -> tuple[int, ...]:
    """`smallest`, doubled until it holds `largest`; the last one is `largest` itself."""
    buckets = []
    size = min(smallest, largest)
    while size < largest:
        buckets.append(size)
        size *= 2
    return (*buckets, largest)


# Tokens of a step from which on its time is theirs: padding beyond it costs what tokens cost.
_FINER_FROM = 512


def token_buckets(largest: int, smallest: int = 1) -> tuple[int, ...]:
    """`smallest` doubled up to _FINER_FROM, then four a doubling: a fifth of such a step at most is padding."""
    buckets = power_of_two_buckets(min(largest, max(smallest, _FINER_FROM)), smallest)
    while buckets[-1] < largest:
        quarter = 2 ** (buckets[-1].bit_length() - 3)
        buckets += (min(buckets[-1] + quarter, largest),)
    return buckets
