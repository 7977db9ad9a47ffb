"""Mosaic's kernels compiled from when they are lowered on, beside all else: XLA would compile one after the other.

JAX's plugin keeps compiled kernels by their hash, for the whole process and whatever module they came in: each is
compiled here in a module of its own that is never run.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

_TARGET = "mosaic_gpu_v2"  # by which JAX 0.11.2 calls a kernel of Mosaic
_THREADS = min(16, os.cpu_count() or 1)

Told = Callable[[bytes, bytes], object]  # of a kernel's hash and its module, as bytecode of MLIR


class _KnownKernels(dict[bytes, bytes]):
    """JAX's register of the kernels that it has lowered in this process, by their hashes; it tells of each new one."""

    def __init__(self, known: dict[bytes, bytes]):
        super().__init__(known)
        self.told: list[Told] = []

    def __setitem__(self, kernel_hash: bytes, module: bytes) -> None:
        super().__setitem__(kernel_hash, module)
        for told in tuple(self.told):
            with contextlib.suppress(RuntimeError):  # it ends just now
                told(kernel_hash, module)


@contextlib.contextmanager
def kernels_beside(device: Any) -> Iterator[None]:
    """In it every kernel is compiled as soon as it is lowered, each in a thread; with it they all are.

    What cannot be compiled so is left to XLA, and so is every error: the step meets it again.

    Args:
        device: One of those that run the steps; they are alike.
    """
    listeners = _listeners()
    with ThreadPoolExecutor(_THREADS) as pool:

        def told(kernel_hash: bytes, module: bytes) -> None:
            pool.submit(compile_alone, kernel_hash, module, device)

        listeners.append(told)
        try:
            yield
        finally:
            listeners.remove(told)


def compile_alone(kernel_hash: bytes, module: bytes, device: Any) -> None:
    """Compiles a kernel for a device, for whatever program of this process calls it later."""
    call: Callable[..., Any] = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((1,), jax.numpy.float32))
    attributes = {"kernel_hash": kernel_hash, "module": module, "use_custom_barrier": False}
    program = jax.jit(lambda: call(**attributes), out_shardings=SingleDeviceSharding(device))
    program.lower().compile()


def _listeners() -> list[Told]:
    """Whom JAX's register tells; nobody is told where a version of JAX has none."""
    from jax.experimental.mosaic.gpu import core  # for those alone who compile steps

    known = getattr(core, "KNOWN_KERNELS", None)
    if not isinstance(known, dict):
        return []
    if not isinstance(known, _KnownKernels):
        core.KNOWN_KERNELS = known = _KnownKernels(known)
    return known.told
