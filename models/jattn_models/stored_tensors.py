"""StoredTensors: a checkpoint's tensors, or pieces of them, as numbers that a model may compute with."""

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jattn.checkpoint import Checkpoint
from jattn_models.quantization import BlockScales

_DTYPES = ("float32", "bfloat16", "float16")
_FP8 = "float8_e4m3fn"
_SCALES = "_scale_inv"  # added to a tensor's name; a factor all the same, not its inverse
_RECOMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")  # old checkpoints store what their configuration says anyway


@dataclasses.dataclass(frozen=True)
class StoredTensors:
    """A checkpoint's tensors; those in fp8 come out with their scales applied.

    Attributes:
        block_scales: How tensors in fp8 are scaled; None if none is in fp8.
    """

    checkpoint: Checkpoint
    block_scales: BlockScales | None = None

    def check_names(self, read: Iterable[str], unread: tuple[str, ...]) -> None:
        """Checks the names alone, before memory is taken for all the layers that a configuration claims.

        Args:
            read: Names of all tensors that will be read.
            unread: How the names of tensors begin that may be there and are not.

        Raises:
            ValueError: A tensor is missing, or there is one too many.
        """
        left = dict.fromkeys(self.checkpoint.tensor_names)
        for name in read:
            if name not in self._names:
                self.checkpoint.read(name)  # raises: it is missing
            left.pop(name, None)
            if self.block_scales is not None:
                left.pop(name + _SCALES, None)
        if others := [name for name in left if not name.startswith(unread) and not _RECOMPUTED.fullmatch(name)]:
            raise ValueError(
                f"{self.checkpoint.path} must hold only tensors that {self.checkpoint.architecture} has a place for. "
                f"Got {len(others)} others, such as {others[0]!r}."
            )

    def read(
        self, name: str, shape: tuple[int, ...], piece: tuple[slice, ...] | None, *, dtype: Any
    ) -> np.ndarray | Array:
        """A tensor, or a piece of one: in the dtype that it is stored in, or in `dtype` if that is fp8.

        Args:
            shape: Of the whole tensor.
            piece: A slice of each axis; no more than that is read. None is all.

        Raises:
            ValueError: It is missing, or has another shape or dtype, or its scales do.
        """
        tensor = self.checkpoint.read(name, shape, piece)
        if self.block_scales is not None and (tensor.dtype.name == _FP8 or name + _SCALES in self._names):
            return self._dequantised(self.block_scales, name, tensor, shape, piece, dtype)
        _check_dtype(name, tensor, _DTYPES)
        return tensor

    def _dequantised(
        self,
        block_scales: BlockScales,
        name: str,
        tensor: np.ndarray,
        shape: tuple[int, ...],
        piece: tuple[slice, ...] | None,
        dtype: Any,
    ) -> Array:
        _check_dtype(name, tensor, (_FP8,))
        block = block_scales.block(len(shape))
        of_scales = tuple(-(-length // size) for length, size in zip(shape, block, strict=True))
        taken = tuple(slice(0, length) for length in shape) if piece is None else piece
        own = tuple(slice(each.start // size, -(-each.stop // size)) for each, size in zip(taken, block, strict=True))
        scales = self.checkpoint.read(name + _SCALES, of_scales, None if piece is None else own)
        _check_dtype(name + _SCALES, scales, _DTYPES)
        numbers = [
            np.arange(each.start, each.stop) // size - first.start
            for each, size, first in zip(taken, block, own, strict=True)
        ]
        return _scaled(tensor, scales, np.ix_(*numbers), dtype=dtype)

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.checkpoint.tensor_names)


def _check_dtype(name: str, tensor: np.ndarray, dtypes: tuple[str, ...]) -> None:
    if tensor.dtype.name not in dtypes:
        raise ValueError(f"Tensor {name!r} must be one of {', '.join(dtypes)}. Got {tensor.dtype}.")


@functools.partial(jax.jit, static_argnames="dtype")
def _scaled(tensor: Array, scales: Array, blocks: tuple[Array, ...], *, dtype: Any) -> Float[Array, "..."]:
    """On the device, where fp8 takes a quarter of float32's bytes to bring.

    Args:
        blocks: For each number of the tensor the place of its factor among the scales, an array an axis.
    """
    return (tensor.astype(jnp.float32) * scales.astype(jnp.float32)[blocks]).astype(dtype)
