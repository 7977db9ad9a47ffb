"""StoredTensors: a checkpoint's tensors, or pieces of them, as numbers that a model may compute with."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jattn.checkpoint import Checkpoint
from jattn.matmul import QuantizedKernel, dequantize_groups, quantize_groups, quantize_kernel
from jattn_models import mxfp4, packed_int4
from jattn_models.quantization import BlockScales, ChannelScales, GroupScales, Mxfp4, Quantization

_DTYPES = ("float32", "bfloat16", "float16")
_FP8 = "float8_e4m3fn"
_SCALES = ("_scale_inv", "_scale")  # added to a tensor's name; factors both, not their inverse
_RECOMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")  # old checkpoints store what their configuration says anyway
_STATIC = re.compile(r".*\.(input_scale|activation_scale|[qkv]_scale|output_scale)")  # of activations and keys


@dataclasses.dataclass(frozen=True)
class StoredTensors:
    """A checkpoint's tensors; those in few bits come out with their scales applied, or beside them.

    Attributes:
        quantization: How tensors in few bits are stored; None if none is.
    """

    checkpoint: Checkpoint
    quantization: Quantization | None = None

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
            required, optional = self._stored_names(name)
            for each in required:
                if each not in self._names:
                    self.checkpoint.read(each)  # raises: it is missing
            for each in (*required, *optional):
                left.pop(each, None)
            if self.scales_beside:
                left.pop(self._scales_name(name), None)
        others = [name for name in left if not name.startswith(unread) and not self._may_be_left(name)]
        if others:
            raise ValueError(
                f"{self.checkpoint.path} must hold only tensors that {self.checkpoint.architecture} has a place for. "
                f"Got {len(others)} others, such as {others[0]!r}."
            )

    def read(
        self, name: str, shape: tuple[int, ...], piece: tuple[slice, ...] | None, *, dtype: Any
    ) -> np.ndarray | Array:
        """A tensor, or a piece of one: in the dtype that it is stored in, or in `dtype` if that is of few bits.

        Args:
            shape: Of the whole tensor.
            piece: A slice of each axis; no more than that is read. None is all.

        Raises:
            ValueError: It is missing, or has another shape or dtype, or its scales do.
        """
        if isinstance(self.quantization, GroupScales) and self.is_in_int4(name):
            return _dequantized(
                packed_int4.read_packed(self.checkpoint, self.quantization, name, shape, piece), dtype=dtype
            )
        if self._is_in_mxfp4(name):
            return mxfp4.read_packed(self.checkpoint, name, shape, piece, dtype=dtype)
        tensor = self.checkpoint.read(name, shape, piece)
        if not self._is_scaled(name, tensor):
            _check_dtype(name, tensor, _DTYPES)
            return tensor
        _check_dtype(name, tensor, (_FP8,))
        scales, numbers = self._scales(name, shape, piece)
        return _scaled(tensor, scales, np.ix_(*numbers), dtype=dtype)

    def read_in_fp8(self, name: str, shape: tuple[int, int], piece: tuple[slice, ...] | None) -> QuantizedKernel:
        """A projection's tensor, or a piece of one, in fp8 with a scale for each output.

        It is quantised here, if it is not stored so: each output by its largest number in the piece.

        Args:
            shape, piece: As of `read`.

        Raises:
            ValueError: As `read`.
        """
        tensor = self.checkpoint.read(name, shape, piece)
        if not self._is_scaled(name, tensor):
            _check_dtype(name, tensor, _DTYPES)
            return _quantized(tensor)
        _check_dtype(name, tensor, (_FP8,))
        scales, (rows, _) = self._scales(name, shape, piece)
        return QuantizedKernel(values=jnp.asarray(tensor), scales=jnp.asarray(scales[rows], jnp.float32))

    def read_in_int4(
        self, name: str, shape: tuple[int, int], piece: tuple[slice, ...] | None, group_size: int
    ) -> QuantizedKernel:
        """A projection's tensor, or a piece of one, in int4 with a scale for each group of inputs.

        It is quantised here, if it is not stored so, and has no zero points then.

        Args:
            shape, piece: As of `read`.
            group_size: Inputs that share a scale; of a tensor that is stored so, as many as come out even in the piece.

        Raises:
            ValueError: As `read`.
        """
        if isinstance(self.quantization, GroupScales) and self.is_in_int4(name):
            kernel = packed_int4.read_packed(self.checkpoint, self.quantization, name, shape, piece)
            assert kernel.group_size == group_size
            return kernel
        tensor = self.checkpoint.read(name, shape, piece)
        _check_dtype(name, tensor, _DTYPES)
        return _in_groups(tensor, group_size=group_size)

    def read_in_blocks(self, name: str, shape: tuple[int, int], piece: tuple[slice, ...] | None) -> QuantizedKernel:
        """A tensor in fp8 with a scale for each block, or a piece of whole blocks of one, as it is stored.

        Raises:
            ValueError: As `read`.
        """
        tensor = self.checkpoint.read(name, shape, piece)
        _check_dtype(name, tensor, (_FP8,))
        scales, _ = self._scales(name, shape, piece)
        return QuantizedKernel(values=jnp.asarray(tensor), scales=jnp.asarray(scales, jnp.float32))

    def held_as(self, names: Iterable[str]) -> Quantization | None:
        """How tensors of experts are stored, all of them alike, if in few bits that may be held; else None."""
        match self.quantization:
            case Mxfp4():
                stored = all(map(self._is_in_mxfp4, names))
            case BlockScales() | ChannelScales():
                stored = all(self.checkpoint.dtype(name) == _FP8 for name in names)
            case _:
                return None
        return self.quantization if stored else None

    def is_in_fp8(self, name: str) -> bool:
        """Whether a tensor is stored in fp8 with a scale for each output, or one for all of it."""
        return isinstance(self.quantization, ChannelScales) and self.checkpoint.dtype(name) == _FP8

    def is_in_int4(self, name: str) -> bool:
        """Whether a tensor is stored in int4: there is none of its name, but those that it is packed into."""
        stored = isinstance(self.quantization, GroupScales) and name not in self._names
        return stored and self._packed_names(name)[0][0] in self._names

    def scales_dtype(self, names: Iterable[str]) -> str:
        """What holds the scales of tensors in int4 as they are stored."""
        assert isinstance(self.quantization, GroupScales)
        packing = self.quantization.packing
        stored = {self.checkpoint.dtype(packed_int4.scales_name(packing, name)) for name in names}
        (dtype,) = stored if len(stored) == 1 else (None,)
        return dtype if dtype in _DTYPES else "float32"

    def _is_in_mxfp4(self, name: str) -> bool:
        """Likewise."""
        stored = isinstance(self.quantization, Mxfp4) and name not in self._names
        return stored and mxfp4.packed_names(name)[0] in self._names

    def _stored_names(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tensors that there must be for one of a model's, and those that there may be beside them."""
        if self.is_in_int4(name):
            return self._packed_names(name)
        return mxfp4.packed_names(name) if self._is_in_mxfp4(name) else (name,), ()

    def _packed_names(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        assert isinstance(self.quantization, GroupScales)
        return packed_int4.stored_names(self.quantization.packing, name)

    def _is_scaled(self, name: str, tensor: np.ndarray) -> bool:
        return self.scales_beside and (tensor.dtype.name == _FP8 or self._scales_name(name) in self._names)

    @property
    def scales_beside(self) -> bool:
        """Whether tensors in fp8 may have scales beside them."""
        return isinstance(self.quantization, BlockScales | ChannelScales)

    def _scales_name(self, name: str) -> str:
        """Of the tensor of another's scales; the first that they might have, if there is none."""
        choices = [name + end for end in (_SCALES if isinstance(self.quantization, BlockScales) else _SCALES[::-1])]
        return next((choice for choice in choices if choice in self._names), choices[0])

    def _scales(
        self, name: str, shape: tuple[int, ...], piece: tuple[slice, ...] | None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """The scales of a tensor or a piece of one, and for each number its scale's place among them, an axis each."""
        name = self._scales_name(name)
        block, of_scales = self._blocks(name, shape)
        taken = tuple(slice(0, length) for length in shape) if piece is None else piece
        own = tuple(slice(each.start // size, -(-each.stop // size)) for each, size in zip(taken, block, strict=True))
        part = None if piece is None or not of_scales else own[: len(of_scales)]
        scales = self.checkpoint.read(name, of_scales, part)
        _check_dtype(name, scales, _DTYPES)
        numbers = [
            np.arange(each.start, each.stop) // size - first.start
            for each, size, first in zip(taken, block, own, strict=True)
        ]
        return scales.reshape([each.stop - each.start for each in own]), numbers

    def _blocks(self, scales_name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The lengths of a block along the axes of a tensor, and the shape that its scales must have."""
        if isinstance(self.quantization, BlockScales):
            block = ((1,) * len(shape) + (self.quantization.rows, self.quantization.columns))[-len(shape) :]
            return block, tuple(-(-length // size) for length, size in zip(shape, block, strict=True))
        stored = self.checkpoint.shape(scales_name) if scales_name in self._names else ()
        if stored in (shape[:1], (shape[0], *[1] * (len(shape) - 1))):
            return (1, *shape[1:]), stored
        return shape, stored if math.prod(stored) == 1 else ()

    def _may_be_left(self, name: str) -> bool:
        """Whether nobody need read a tensor: it can be told, or is not done and that has been said."""
        if isinstance(self.quantization, GroupScales) and name.endswith(".bias"):
            # GPTQ's tools give every projection one, which is 0 if the model has none.
            of_projection = self.is_in_int4(name.removesuffix("bias") + "weight")
            return of_projection and not np.any(self.checkpoint.read(name))
        not_done = isinstance(self.quantization, ChannelScales) and self.quantization.not_done
        return bool(_RECOMPUTED.fullmatch(name) or (not_done and _STATIC.fullmatch(name)))

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


_quantized = jax.jit(quantize_kernel)  # on the device likewise
_in_groups = jax.jit(quantize_groups, static_argnames="group_size")
_dequantized = jax.jit(dequantize_groups, static_argnames="dtype")
