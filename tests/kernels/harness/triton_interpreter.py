"""Triton's interpreter behind JAX's arrays: kernels run on the CPU, by NumPy, with no torch.

Kernels are interpreted if TRITON_INTERPRET=1 is set before Triton is imported: `tests/conftest.py` does.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels.triton import launch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the tests of GPUs compile Triton's kernels", allow_module_level=True)
pytest.importorskip("triton", reason="the group `dev` has it")
import triton.language as tl
from triton.runtime import interpreter


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Calls that are traced inside may ask for `triton`, and are interpreted."""
    with launch.interpreted(run):
        yield


def run(kernel: Any, operands: Sequence[Any], written: Sequence[np.ndarray], grid: int, config: Any) -> None:
    """What `launch.interpreted` takes; the interpreter is not made for several threads."""
    arrays = [None if array is None else _Memory(array) for array in (*operands, *written)]

    def interpret() -> None:
        with np.errstate(over="ignore"):  # which a GPU says nothing of
            kernel[(grid,)](*arrays, C=config)

    _thread.submit(interpret).result()


# XLA calls from threads of its own, in which numbers below float32's normal ones are 0; a GPU tells them apart.
_thread = ThreadPoolExecutor(1)
_thread.submit(int).result()  # so that it is this thread's child


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes int() of arrays of one number, which NumPy 2.5 refuses."""
    _original_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
    scope.set_attr(tensor, "__int__", lambda self: int(self.handle.data.item()))


_original_patch = interpreter._patch_lang_tensor  # pyright: ignore[reportAttributeAccessIssue]
interpreter._patch_lang_tensor = _patch_lang_tensor  # pyright: ignore[reportAttributeAccessIssue]


def _convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """The interpreter cuts bits off where a GPU rounds to the nearest bfloat16."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _original_convert(data, source, target, rounding)
    return data.astype(jnp.bfloat16).view(np.uint16)


_original_convert = interpreter._convert_float
interpreter._convert_float = _convert_float


def _create_splat(builder: Any, result: Any, number: Any) -> Any:
    """The interpreter makes integers of a truth that is spread over a block, and refuses them in masks."""
    block = _original_splat(builder, result, number)
    if number.data.dtype == np.bool_:
        block.data = block.data.astype(np.bool_)
    return block


_original_splat = interpreter.InterpreterBuilder.create_splat
interpreter.InterpreterBuilder.create_splat = _create_splat


def _create_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
    """The interpreter has the bits of a bfloat16, and takes them for numbers in products."""
    return _original_dot(builder, _as_float32(a), _as_float32(b), *others)


def _as_float32(operand: Any) -> Any:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


_original_dot = interpreter.InterpreterBuilder.create_dot
interpreter.InterpreterBuilder.create_dot = _create_dot


class _Memory:
    """An array of NumPy as the interpreter wants a tensor: it asks for an address and a dtype, and copies nothing.

    Attributes:
        dtype: Name of the dtype, as Triton spells it.
    """

    def __init__(self, array: np.ndarray):
        self._array = np.ascontiguousarray(array)
        self.dtype = array.dtype.name

    def data_ptr(self) -> int:
        """Its address."""
        return self._array.ctypes.data

    def untyped_storage(self) -> "_Memory":
        """It is its own memory, on the host."""
        return self

    cpu = untyped_storage

    def new_empty(self, *_: Any, **__: Any) -> "_Memory":
        """A tensor that is to become a view of it."""
        return self

    def set_(self, *_: Any) -> None:
        """Nothing is to be done: it is the view."""

    copy_ = set_

    def storage_offset(self) -> int:
        """Where the view begins."""
        return 0

    def size(self) -> tuple[int, ...]:
        """Its shape."""
        return self._array.shape

    stride = size
