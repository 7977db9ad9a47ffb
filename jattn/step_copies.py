"""A compiled step loaded for other devices than the one that it was compiled for: a copy runs the very same code.

Compiled anew, it might not: XLA tries products, and another device may find another way to be the fastest.
"""

import io
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler  # no public name sets the device of a program that was written
from jax.experimental import serialize_executable

Written = tuple[bytes, Any, Any]  # of `serialize_executable.serialize`


def copies_of(written: Written, devices: Sequence[Any]) -> list[jax.stages.Compiled]:
    """A program of one device, ready to run on each of these.

    Args:
        written: As `jax.experimental.serialize_executable.serialize` gives it.
    """
    return [_copy(written, device) for device in devices]


def _copy(written: Written, device: Any) -> jax.stages.Compiled:
    program, in_tree, out_tree = written
    unloaded, facts, no_kwargs = _OnDevice(io.BytesIO(program), device.client, [device]).load()
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(facts), out_tree, no_kwargs=no_kwargs)


class _OnDevice(serialize_executable._JaxPjrtUnpickler):  # pyright: ignore[reportPrivateUsage]
    """Reads a program as that of its one device, whichever it was compiled for."""

    def persistent_load(self, pid: Any) -> Any:
        (device,) = self.execution_devices
        if pid[0] == "device":
            return device
        if pid[0] == "exec":
            options = compiler.get_compile_options(1, 1, device_assignment=np.array([[device.id]]))
            return self.backend.deserialize_executable(pid[1], self.execution_devices, compile_options=options)
        return super().persistent_load(pid)
