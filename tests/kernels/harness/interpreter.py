"""Hopper kernels on the CPU, under the interpreter, each of them watched for races."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest
from jax._src import callback as callbacks
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

from jattn_kernels.mosaic.sm90.common import tiles
from tests.kernels.harness import races


@contextlib.contextmanager
def interpreted(*, numpy: bool = True) -> Iterator[None]:
    """Kernels inside run under the interpreter. A race in any of them is an error in the end.

    The interpreter itself remembers those of the last kernel only, which after decode's is the merge's.

    Args:
        numpy: Whether accesses are of NumPy's arrays: in half the time, and threads overtake each other more.
    """
    states: list[Any] = []
    to_int: Any = shared_memory._to_int

    def watched(*args: Any, **facts: Any) -> Any:
        states.append(races.GPURaceDetectionState(*args, **facts))
        return states[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_callbacks, "GPURaceDetectionState", watched)
        patch.setattr(gpu_callbacks, "_allocate_buffer_for_all_threads", _allocated_once)
        if numpy:
            patch.setattr(callbacks, "io_callback_impl", _called_with_numpy)
        patch.setattr(shared_memory, "_to_int", lambda x: x.item() if isinstance(x, np.ndarray) else to_int(x))
        try:
            with tiles.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
                yield
            jax.effects_barrier()
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()
    assert not any(state.races_found for state in states), "a kernel has a race: the captured output says where"


class _Own:
    """An array that NumPy takes as it is where it is asked for a copy."""

    def __init__(self, array: np.ndarray):
        self._array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._array


_allocate: Any = gpu_callbacks._allocate_buffer_for_all_threads


def _allocated_once(token: Any, mesh_location: Any, device: Any, request: Any, value: Any, **facts: Any) -> Any:
    """The interpreter copies what is in a buffer for each thread, of which there are dozens, and keeps the first."""
    own = value if isinstance(value, np.ndarray) else np.array(value)  # `_called_with_numpy` has copied it already
    return _allocate(token, mesh_location, device, request, _Own(own), **facts)


def _called_with_numpy(*operands: Any, callback: Any, **_: Any) -> Any:
    """What the interpreter does for each access, of arrays of NumPy: JAX would put all operands on a device for it."""
    return jax.tree.map(np.asarray, callback(*map(np.array, operands)))
