"""Mosaic's kernels of a lowered step, compiled beside XLA, which would compile one after the other as it meets them.

JAX's plugin keeps compiled kernels by their hash, for the whole process and whatever module they came in: each is
compiled here in a module of its own that is never run.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.extend.mlir import ir
from jax.sharding import SingleDeviceSharding

_TARGET = b"mosaic_gpu_v2"  # by which JAX calls a kernel of Mosaic
_THREADS = min(16, os.cpu_count() or 1)


class MosaicKernel(NamedTuple):
    """What its compilation reads of a call, by the names of the call's attributes.

    Attributes:
        module: The kernel, as bytecode of MLIR.
    """

    kernel_hash: bytes
    module: bytes
    use_custom_barrier: bool


@contextlib.contextmanager
def kernels_beside(lowered: jax.stages.Lowered, device: Any) -> Iterator[None]:
    """In it the kernels of a step are being compiled, each in a thread; with it they all are.

    What cannot be compiled so is left to XLA, and so is every error: the step meets it again.

    Args:
        device: One of those that run the step; they are alike.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        with contextlib.suppress(Exception):  # JAX's calls of kernels may come to look otherwise
            for kernel in mosaic_kernels(lowered):
                pool.submit(compile_alone, kernel, device)
        yield


def mosaic_kernels(lowered: jax.stages.Lowered) -> list[MosaicKernel]:
    """The kernels that a program calls, each once.

    Raises:
        KeyError: A call lacks what JAX 0.11.2 gives it.
        ValueError: Or has it as something else.
    """
    calls: list[Any] = []

    def look_at(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call" and _bytes(operation.attributes["call_target_name"]) == _TARGET:
            calls.append(operation.attributes["mhlo.backend_config"])
        return ir.WalkResult.ADVANCE

    program: Any = lowered.compiler_ir("stablehlo")
    program.operation.walk(look_at)
    kernels = [
        MosaicKernel(_bytes(told["kernel_hash"]), _bytes(told["module"]), ir.BoolAttr(told["use_custom_barrier"]).value)
        for told in calls
    ]
    return list({kernel.kernel_hash: kernel for kernel in kernels}.values())


def compile_alone(kernel: MosaicKernel, device: Any) -> None:
    """Compiles a kernel for a device, for whatever program of this process calls it later."""
    call: Callable[..., Any] = jax.ffi.ffi_call(_TARGET.decode(), jax.ShapeDtypeStruct((1,), jax.numpy.float32))
    program = jax.jit(lambda: call(**kernel._asdict()), out_shardings=SingleDeviceSharding(device))
    program.lower().compile()


def _bytes(attribute: Any) -> bytes:
    return ir.StringAttr(attribute).value_bytes
