"""What moves or converts values outside of `jit` is done by NumPy, where JAX compiles a program for each shape.

That takes 15 ms, thousands of times in a run of the tests. Whoever listens for compilations hears of the same ones.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.lax.lax import stack_p
from jax.extend.core import primitives as of

_COMPILED = "/jax/core/compile/backend_compile_duration"
_put = jax.device_put  # which a test may have do something else


def move_by_numpy() -> None:
    """From now on, in this process."""
    for primitive, move in MOVES.items():
        primitive.def_impl(_Mover(primitive.impl, move))


class _Mover:
    """What a primitive does outside of `jit`.

    Attributes:
        compiled: JAX's way, for operands on a device that somebody chose, and whatever else is not taken here.
        move: NumPy's way, of the operands and the primitive's parameters.
        heard: The programs that JAX would have compiled by now.
    """

    def __init__(self, compiled: Callable[..., Any], move: Callable[..., np.ndarray]):
        self.compiled, self.move, self.heard = compiled, move, set()

    def __call__(self, *operands: Any, **parameters: Any) -> Any:
        told = parameters.get("weak_type") or parameters.get("sharding") or jax.config.jax_default_device
        if told or not all(map(_is_taken, operands)) or not _rounds_alike(operands, parameters):
            return self.compiled(*operands, **parameters)
        given = [np.asarray(operand).astype(operand.dtype, copy=False) for operand in operands]
        with np.errstate(all="ignore"):
            moved = self.move(*given, **parameters)
        placeless = {name: value for name, value in parameters.items() if not name.endswith("_indices")}
        program = *((each.shape, each.dtype) for each in (*given, moved)), *placeless.items()
        if program not in self.heard:
            self.heard.add(program)
            jax.monitoring.record_event_duration_secs(_COMPILED, 0.0)
        return _put(moved, may_alias=False)


def _is_taken(operand: Any) -> bool:
    kind = jax.typeof(operand)
    if not isinstance(kind.dtype, np.dtype) or kind.weak_type:
        return False
    return not isinstance(operand, jax.Array) or not (operand.committed or len(operand.devices()) > 1)


def _rounds_alike(operands: Any, parameters: dict[str, Any]) -> bool:
    """XLA has its own way with what no integer and no 8 bits hold."""
    into = parameters.get("new_dtype")
    if into is None:
        return True
    return operands[0].dtype.kind in "biu" if into.kind in "biu" else into.itemsize > 1


def _broadcast(operand: np.ndarray, *, shape: Any, broadcast_dimensions: Any, sharding: None) -> np.ndarray:
    places = [1] * len(shape)
    for place, size in zip(broadcast_dimensions, operand.shape, strict=True):
        places[place] = size
    return np.broadcast_to(operand.reshape(places), shape)


def _iota(*, dtype: Any, shape: Any, dimension: int, sharding: None) -> np.ndarray:
    return _broadcast(
        np.arange(shape[dimension]).astype(dtype), shape=shape, broadcast_dimensions=(dimension,), sharding=None
    )


def _slice(operand: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    steps = strides or [1] * operand.ndim
    return operand[tuple(map(slice, start_indices, limit_indices, steps))]


MOVES: dict[Any, Callable[..., np.ndarray]] = {
    core.stage_p: lambda operand: operand,
    of.broadcast_in_dim_p: _broadcast,
    of.concatenate_p: lambda *operands, dimension: np.concatenate(operands, dimension),
    of.convert_element_type_p: lambda operand, *, new_dtype, weak_type, sharding: operand.astype(new_dtype),
    of.iota_p: _iota,
    of.reshape_p: lambda operand, *, new_sizes, dimensions, sharding: operand.reshape(new_sizes),
    of.slice_p: _slice,
    of.squeeze_p: lambda operand, *, dimensions: operand.squeeze(dimensions),
    of.transpose_p: lambda operand, *, permutation: operand.transpose(permutation),
    stack_p: lambda *operands, axis: np.stack(operands, axis),
}
