"""Mosaic kernels without the operations that JAX's lowering repeats, so that XLA has less to copy, search and compile.

JAX 0.11.2 makes a kernel's indices and constants anew at each use: of the 32,604 operations of the kernel that is a
layer of Qwen3-30B-A3B for one token 11,369 are left without repetitions. XLA keeps the text of a kernel with each of
its calls, and looks through it several times; Mosaic goes over the operations often before it drops the repeated ones
itself, late and by this same pass, so that the machine code is the same or nearly so. Where in Python an operation
comes from is a tenth of that text, which nobody reads.
"""

from typing import Any

import jax.experimental.mosaic.gpu.core as mosaic_core
from jax.extend.mlir import ir, passmanager

_lower = mosaic_core.lower_mgpu_module


def install() -> None:
    """Lets JAX lower so from now on, in this process."""
    mosaic_core.lower_mgpu_module = lower_mgpu_module


def lower_mgpu_module(module: ir.Module, *args: Any, **kwargs: Any) -> None:
    """JAX's lowering of a kernel, in place, and then no operation twice where once is enough."""
    _lower(module, *args, **kwargs)
    passmanager.PassManager.parse("builtin.module(cse,strip-debuginfo)", module.context).run(module.operation)
