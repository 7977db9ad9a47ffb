"""Devices of one process in a row: arrays of which each holds a share, arrays that all hold, functions that all run.

Shares lie one behind the other along an array's first axis, so that a device's part of the array is its share as it
would be alone, without a copy.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jattn.parallel import Parallel


@functools.cache
def mesh_of(parallel: Parallel) -> Mesh:
    """The first devices of this process, along the one axis of `parallel`.

    Raises:
        ValueError: There are fewer.
    """
    assert parallel.axis is not None
    devices = jax.local_devices()
    if parallel.size > len(devices):
        raise ValueError(
            f"`tensor_parallel` must be at most the number of devices that JAX has here, {len(devices)}. "
            f"Got {parallel.size}."
        )
    return Mesh(np.asarray(devices[: parallel.size]), (parallel.axis,), axis_types=(AxisType.Auto,))


def held_by_all(parallel: Parallel) -> NamedSharding | None:
    """Where an array lies that each device has all of; None on one device."""
    return None if parallel.axis is None else NamedSharding(mesh_of(parallel), PartitionSpec())


@dataclasses.dataclass(frozen=True)
class OnAll:
    """A function that every device calls with what it holds.

    Attributes:
        function: Of pytrees; may sum and gather along the axis.
        parallel: The devices.
        takes_shares: Of each argument, whether it holds shares; all devices have the others whole, and the same.
        gives_shares: Likewise of the result, or of each of several.
    """

    function: Callable[..., Any]
    parallel: Parallel
    takes_shares: tuple[bool, ...]
    gives_shares: bool | tuple[bool, ...]

    def __call__(self, *arguments: Any) -> Any:
        spec = {True: PartitionSpec(self.parallel.axis), False: PartitionSpec()}
        mapped = jax.shard_map(
            self.function,
            mesh=mesh_of(self.parallel),
            in_specs=tuple(spec[each] for each in self.takes_shares),
            out_specs=jax.tree.map(spec.__getitem__, self.gives_shares),
            check_vma=False,  # kernels do not say what varies between devices
        )
        return mapped(*arguments)


def made[Result](make: Callable[[], Result], parallel: Parallel, *, shares: bool) -> Result:
    """What a function of no arguments makes, on each device: its share of the whole, or the same as on the others."""
    if parallel.axis is None:
        return make()
    return jax.jit(OnAll(make, parallel, takes_shares=(), gives_shares=shares))()


def side_by_side[Tree](parts: Sequence[Tree], parallel: Parallel) -> Tree:
    """One tree of arrays of the trees that the devices hold, each on its device; nothing is copied."""
    mesh = mesh_of(parallel)
    sharding = NamedSharding(mesh, PartitionSpec(parallel.axis))

    def joined(*shares: jax.Array) -> jax.Array:
        first, *rest = shares[0].shape
        return jax.make_array_from_single_device_arrays((parallel.size * first, *rest), sharding, list(shares))

    return jax.tree.map(joined, *parts)


def bytes_on_one(leaf: jax.Array) -> int:
    """What an array takes on each device that holds some of it."""
    bits = int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * jax.dtypes.itemsize_bits(leaf.dtype)
    return -(-bits // 8)


def memory_stats() -> dict[str, int]:
    """What JAX counts of a device's memory; nothing where it does not, as on a CPU."""
    return jax.local_devices()[0].memory_stats() or {}
