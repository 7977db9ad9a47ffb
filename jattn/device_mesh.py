"""Devices in a row: arrays of which each holds a share, arrays that all hold, functions that all run.

Shares lie one behind the other along an array's first axis, so that a device's part of the array is its share as it
would be alone, without a copy. Where several processes share a model, each has arrays, plans and requests as the others
have, and touches the parts of its own devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jattn.parallel import Parallel


@functools.cache
def mesh_of(parallel: Parallel) -> Mesh:
    """The first devices, along the one axis of `parallel`; all there are in several processes, in their order.

    Raises:
        ValueError: There are fewer, or not as many as in all processes.
    """
    assert parallel.axis is not None
    devices, num_processes = jax.devices(), jax.process_count()
    if num_processes > 1 and parallel.size != len(devices):
        raise ValueError(
            f"`tensor_parallel` must be 1, or the number of devices of all {num_processes} processes of "
            f"`jax.distributed`, {len(devices)}. Got {parallel.size}."
        )
    if parallel.size > len(devices):
        raise ValueError(
            f"`tensor_parallel` must be at most the number of devices that JAX has here, {len(devices)}. "
            f"Got {parallel.size}."
        )
    return Mesh(np.asarray(devices[: parallel.size]), (parallel.axis,), axis_types=(AxisType.Auto,))


def spans_processes(parallel: Parallel) -> bool:
    """Whether the devices are those of several processes, which must come to the same and launch the same."""
    return parallel.axis is not None and jax.process_count() > 1


def own_devices(parallel: Parallel) -> list[tuple[int, Any]]:
    """The devices of this process, each behind its number along the axis."""
    devices = enumerate(mesh_of(parallel).devices.flat)
    return [(rank, device) for rank, device in devices if device.process_index == jax.process_index()]


def least_of_processes(number: int, parallel: Parallel) -> int:
    """The least number that a process gives; all of them must call this. It has 31 bits where they are several."""
    if not spans_processes(parallel):
        return number
    own = np.asarray([min(number, np.iinfo(np.int32).max)], np.int32)
    return int(np.min(multihost_utils.process_allgather(own)))


def held_by_all(parallel: Parallel) -> NamedSharding | None:
    """Where an array lies that each device has all of; None on one device."""
    return None if parallel.axis is None else NamedSharding(mesh_of(parallel), PartitionSpec())


def sent(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """The host's array where all devices have it, or wherever `jax.device_put` puts it; the same in each process."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    # `jax.device_put` would compare it with the other processes' each time.
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


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
    """One tree of arrays of the trees that this process' devices hold, each on its device; nothing is copied."""
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
