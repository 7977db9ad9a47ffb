"""Hopper kernels on the CPU, under the interpreter, each of them watched for races."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from jattn_kernels.mosaic.sm90.common import tiles


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Kernels inside run under the interpreter. A race in any of them is an error in the end.

    The interpreter itself remembers those of the last kernel only, which after decode's is the merge's.
    """
    states: list[Any] = []
    of_a_kernel: Any = gpu_callbacks.GPURaceDetectionState

    def watched(*args: Any, **facts: Any) -> Any:
        states.append(of_a_kernel(*args, **facts))
        return states[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_callbacks, "GPURaceDetectionState", watched)
        try:
            with tiles.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
                yield
            jax.effects_barrier()
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()
    assert not any(state.races_found for state in states), "a kernel has a race: the captured output says where"
