"""Weights that a later product reads: for a kernel before it, which asks memory for some of them as it ends."""

import dataclasses
import functools
import typing

import jax
from jaxtyping import Array, Int, Shaped

from jattn_kernels.quantized import QuantizedKernel


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ahead:
    """A layer's weights in few bits, of which some may be in the GPU's cache before they are read.

    While a kernel ends and the next one begins memory has nothing to do. No result depends on it.

    Attributes:
        values: As of a QuantizedKernel of all layers.
        layer_index: Which one.
    """

    values: Shaped[Array, "L F D"]
    layer_index: Int[Array, ""]

    @classmethod
    def of(cls, kernel: Array | QuantizedKernel, layer_index: Int[Array, ""] | int | None) -> "tuple[Ahead, ...]":
        """It, if there is one: of a stack of layers in few bits."""
        if not isinstance(kernel, QuantizedKernel) or layer_index is None or kernel.values.ndim != 3:
            return ()
        return (cls(values=kernel.values, layer_index=jax.numpy.asarray(layer_index, jax.numpy.int32)),)
