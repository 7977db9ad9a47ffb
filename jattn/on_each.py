"""Programs that each of several devices runs by itself, and what it has for them; a thread sends each device's.

Devices that exchange in kernels need no program of XLA's in common, and to send one takes the host the longer the more
devices there are: XLA has a thread for each, all of them go through the kernels at the same time, and take a lock at
each. A decode step of Llama-3-8B shapes on four H200s took the host 3.2 ms, and the devices 2.0.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from jattn.parallel import numbered


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnEach:
    """What each device has of a tree.

    Attributes:
        parts: The devices' trees, in their order.
    """

    parts: tuple[Any, ...]


def apart(arrays: Any, devices: Sequence[Any]) -> Any:
    """Arrays that devices share, or all have, as each has them; the arrays as they are if there are no devices.

    Nothing is copied: once they are apart, only the parts may be donated.
    """
    if not devices:
        return arrays

    def of(device: Any, array: jax.Array) -> jax.Array:
        return next(shard.data for shard in array.addressable_shards if shard.device == device)

    return OnEach(tuple(jax.tree.map(functools.partial(of, device), arrays) for device in devices))


def first_of(held: Any) -> Any:
    """The first device's part, or what is not apart as it is."""
    return held.parts[0] if isinstance(held, OnEach) else held


def each(function: Callable[[Any], Any], held: Any) -> Any:
    """A function of each device's part, or of what is not apart."""
    return OnEach(tuple(map(function, held.parts))) if isinstance(held, OnEach) else function(held)


@dataclasses.dataclass(frozen=True)
class OfOne:
    """A function as one of several devices runs it, which is told its number behind the other arguments.

    Attributes:
        function: Of pytrees; what it computes from a `Parallel` is for that device.
    """

    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        *others, number = arguments
        with numbered(number):
            return self.function(*others)


class StepOnEach:
    """A step as programs of one device each. They must be sent to all devices in the order of other steps.

    Args:
        programs: Compiled, of an `OfOne`; copies of one, so that devices come to the same bits.
        devices: Where they run.
    """

    def __init__(self, programs: Sequence[Any], devices: Sequence[Any]):
        self.programs = tuple(programs)
        self._senders = tuple(map(_sender, devices[1:]))
        self._numbers = tuple(jax.device_put(np.int32(number), device) for number, device in enumerate(devices))

    def memory_analysis(self) -> Any:
        """Of one device's."""
        return self.programs[0].memory_analysis()

    def __call__(self, *arguments: Any) -> Any:
        """Sends all; of each result, of several, what each device has."""
        others = [sender.submit(self._send, number, arguments) for number, sender in enumerate(self._senders, 1)]
        with _done(others):
            first = self._send(0, arguments)
        results = [first, *(other.result() for other in others)]
        return tuple(map(_on_each, *results)) if type(first) is tuple else _on_each(*results)

    def _send(self, number: int, arguments: Sequence[Any]) -> Any:
        own = (given.parts[number] if isinstance(given, OnEach) else given for given in arguments)
        return self.programs[number](*own, self._numbers[number])


def _on_each(*parts: Any) -> OnEach:
    return OnEach(parts)


@contextlib.contextmanager
def _done(futures: Sequence[Any]) -> Iterator[None]:
    """Leaves once the other devices have theirs, whatever happens: they would wait for the next step in vain."""
    try:
        yield
    finally:
        wait(futures)


@functools.cache
def _sender(device: Any) -> ThreadPoolExecutor:
    """The thread that sends programs to a device, one after the other."""
    return ThreadPoolExecutor(1, f"jattn-send-{device.id}")
