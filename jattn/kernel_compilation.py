"""A step's Mosaic kernels compiled beside the step: XLA would compile one after the other, once all else is done.

Mosaic keeps what it has compiled for the whole process, by a kernel's hash. So a program of one kernel, compiled in a
thread of its own, leaves the step's compilation nothing to do but to look it up.
"""

from concurrent.futures import Executor
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

from jattn.progress import logger

TARGET = "mosaic_gpu_v2"  # what JAX 0.11.2 calls a kernel by
_HASH, _DEVICES = "kernel_hash", "xla_replica_ids"

Attributes = dict[str, bytes | bool]


def compile_kernels(lowered: jax.stages.Lowered, pool: Executor) -> None:
    """Begins to compile a step's kernels, and waits for none. What cannot be compiled so is left to the step."""
    try:
        found = kernels_of(lowered)
    except Exception as reason:  # JAX does not promise how it writes these calls
        logger.info("Kernels are compiled with their step: %s", reason)
        return
    for kernel in found:
        pool.submit(program_of(kernel).compile)


def kernels_of(lowered: jax.stages.Lowered) -> list[Attributes]:
    """What each kernel is called with; those that exchange with other devices are left out."""
    found: dict[Any, Attributes] = {}

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value == TARGET:
            named = {each.name: each.attr for each in operation.attributes["mhlo.backend_config"]}
            if named[_HASH] not in found and _DEVICES not in named:
                found[named[_HASH]] = {name: _value(attribute) for name, attribute in named.items()}
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    return list(found.values())


def program_of(kernel: Attributes) -> jax.stages.Lowered:
    """A program that calls a kernel, and is not to be run: it has no arguments."""
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((), jnp.float32))
    return jax.jit(lambda: call(**kernel)).lower()


def _value(attribute: Any) -> bytes | bool:
    return ir.StringAttr(attribute).value_bytes if isinstance(attribute, ir.StringAttr) else ir.BoolAttr(attribute).value
