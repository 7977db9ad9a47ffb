"""The launch of a Triton kernel through jax-triton: into XLA's executable, with no Python when it runs."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn_kernels.call import default_device
from jattn_kernels.triton.short_calls import ShortCalls

# (kernel, operands, arrays to write into, grid=, config=): writes what the kernel does, arrays being NumPy's.
Interpreter = Callable[..., None]
_interpreter: contextvars.ContextVar[Interpreter | None] = contextvars.ContextVar("interpreter", default=None)


@contextlib.contextmanager
def interpreted(interpreter: Interpreter) -> Iterator[None]:
    """Kernels that are traced inside are run by an interpreter on the CPU."""
    token = _interpreter.set(interpreter)
    try:
        yield
    finally:
        _interpreter.reset(token)


def is_interpreting() -> bool:
    """Whether kernels that are traced now will be interpreted."""
    return _interpreter.get() is not None


def launch(
    kernel: Any,
    *operands: jax.Array | None,
    config: Any,
    grid: int,
    in_place: Sequence[jax.Array] = (),
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
    warps: int = 4,
) -> tuple[jax.Array, ...]:
    """Runs a kernel that takes operands, arrays that it writes into, and its outputs, in this order, and `C`.

    Args:
        operands: None for those that the kernel, by its `config`, does not read.
        config: A hashable value, constant in the kernel.
        grid: Programs.

    Returns:
        The arrays of `in_place` as they are then, and the outputs. What the kernel leaves out is undefined.
    """
    interpreter = _interpreter.get()
    if interpreter is not None:
        return _interpret(
            functools.partial(interpreter, kernel, grid=grid, config=config), operands, in_place, out_type
        )
    refs = [jax.new_ref(array) for array in in_place]
    outs = _triton_call()(
        *operands,
        *refs,
        kernel=kernel,
        out_type=list(out_type),
        grid=grid,
        num_warps=warps,
        compute_capability=_compute_capability(),
        backend_options={"enable_fp_fusion": True},  # as Triton's default was up to 3.9
        C=config,
    )
    return (*(jax.freeze(ref) for ref in refs), *outs)


def _compute_capability() -> int | None:
    capability = default_device().compute_capability
    return None if capability is None else 10 * capability[0] + capability[1]


@functools.cache
def _triton_call() -> Any:
    """jax-triton's, which asks triton's driver for a name that is gone from triton 3.6; its calls are short."""
    import triton.backends.nvidia.driver as driver

    if not hasattr(driver, "TMA_TF32"):
        driver.TMA_TF32 = 0  # read for tensor descriptors of float32 alone, which no kernel here has
    import jax_triton
    from jax_triton import triton_lib

    if triton_lib.triton_kernel_call_lib is not None:  # None where jaxlib has nothing for GPUs
        triton_lib.triton_kernel_call_lib = ShortCalls(triton_lib.triton_kernel_call_lib)
    return jax_triton.triton_call


def _interpret(
    run: Callable[..., None],
    operands: Sequence[jax.Array | None],
    in_place: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
) -> tuple[jax.Array, ...]:
    def on_the_host(operands: Any, in_place: Any) -> Any:
        written = [np.array(array) for array in in_place] + [_garbage(out) for out in out_type]
        run([None if operand is None else np.asarray(operand) for operand in operands], written)
        return tuple(written)

    results = (*(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in in_place), *out_type)
    return jax.pure_callback(on_the_host, results, tuple(operands), tuple(in_place))


def _garbage(out: jax.ShapeDtypeStruct) -> np.ndarray:
    """Memory that nobody has written to: NaN, or a number that no kernel means."""
    fill = np.nan if jnp.issubdtype(out.dtype, np.floating) else np.iinfo(out.dtype).max
    return np.full(out.shape, fill, out.dtype)
