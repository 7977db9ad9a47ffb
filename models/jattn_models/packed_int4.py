"""Weights in int4 as tools pack them: eight numbers in an int32, and scales and zero points for groups of inputs.

Of a projection NAME.weight of F outputs and D inputs, in G groups of inputs, there are

    AWQ (its version "gemm")    NAME.qweight [D, F / 8], .qzeros [G, F / 8], .scales [G, F]
    GPTQ                        NAME.qweight [D / 8, F], .qzeros [G, F / 8], .scales [G, F], perhaps .g_idx [D]
    compressed-tensors          NAME.weight_packed [F, D / 8], .weight_scale [F, G], perhaps .weight_shape [2], and if
                                not all are 0 .weight_zero_point [F / 8, G]

Numbers and zero points are stored with 8 added, the first in the lowest bits, but for AWQ's, which alternate. The first
format of GPTQ stores zero points less 1, all eight subtracted as one number.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Int32

from jattn.checkpoint import Checkpoint
from jattn.matmul import INT4, QuantizedKernel
from jattn_models.quantization import GroupScales, Packing

_REQUIRED = {"awq": ("qweight", "qzeros", "scales"), "compressed-tensors": ("weight_packed", "weight_scale")}
_OPTIONAL = {"awq": (), "compressed-tensors": ("weight_shape", "weight_zero_point")}
_REQUIRED["gptq"] = _REQUIRED["gptq_v2"] = _REQUIRED["awq"]
_OPTIONAL["gptq"] = _OPTIONAL["gptq_v2"] = ("g_idx",)
_IN_WORD, _BITS, _MIDDLE = 8, 4, 8
_ALTERNATING = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each of eight numbers in AWQ's words
_ONES = 0x11111111
_DTYPES = ("float32", "bfloat16", "float16")


def stored_names(packing: Packing, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the tensors of a projection are called that there must be, and those that there may be."""
    stem = _stem(name)
    return tuple(stem + end for end in _REQUIRED[packing]), tuple(stem + end for end in _OPTIONAL[packing])


def scales_name(packing: Packing, name: str) -> str:
    """What the tensor of a projection's scales is called."""
    return _stem(name) + ("weight_scale" if packing == "compressed-tensors" else "scales")


def read_packed(
    checkpoint: Checkpoint, stored: GroupScales, name: str, shape: tuple[int, ...], piece: tuple[slice, ...] | None
) -> QuantizedKernel:
    """A projection, or a piece of one; its groups are as large as come out even in the piece.

    Args:
        shape: Of the whole, [outputs, inputs].
        piece: A slice of each axis; no more is read than the words and groups that have some of it. None is all.

    Raises:
        ValueError: A tensor is missing, has another shape or dtype, or says something else than is announced.
    """
    reader = _Reader(checkpoint, stored, name, shape, piece)
    reader.check()
    size = math.gcd(reader.size, reader.inputs.start, reader.inputs.stop)
    first = np.arange(reader.inputs.start, reader.inputs.stop, size)
    held = first // reader.size - reader.groups.start  # for each group that is held the stored one
    zero_points = reader.zero_points()
    return QuantizedKernel(
        values=reader.values(),
        scales=reader.scales()[held],
        zero_points=None if zero_points is None else zero_points[held],
    )


class _Reader:
    """Reads the tensors of one piece, each as a QuantizedKernel has it, the middle of four bits 0."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stored: GroupScales,
        name: str,
        shape: tuple[int, ...],
        piece: tuple[slice, ...] | None,
    ):
        self.checkpoint, self.stored, self.shape, self.is_whole = checkpoint, stored, shape, piece is None
        self.stem, (self.num_outputs, self.num_inputs) = _stem(name), shape
        self.outputs, self.inputs = (slice(0, length) for length in shape) if piece is None else piece
        self.size = stored.group_size or self.num_inputs
        self.num_groups = -(-self.num_inputs // self.size)
        self.groups = slice(self.inputs.start // self.size, -(-self.inputs.stop // self.size))

    def check(self) -> None:
        """Checks what is said beside the numbers.

        Raises:
            ValueError: It does not go with what is announced.
        """
        if self._has("g_idx"):
            of_groups = self._read("g_idx", (self.num_inputs,), (slice(0, self.num_inputs),))
            if not np.array_equal(of_groups, np.arange(self.num_inputs) // self.size):
                raise ValueError(
                    f"Tensor {self.stem + 'g_idx'!r} must have each input in the group that it lies in, as "
                    "`quantization_config` announces no act-order: quantise with desc_act=false or static groups."
                )
        if self._has("weight_shape"):
            said = self.checkpoint.read(self.stem + "weight_shape", (2,))
            if tuple(said.tolist()) != self.shape:
                raise ValueError(
                    f"Tensor {self.stem + 'weight_shape'!r} must be {list(self.shape)}. Got {said.tolist()}."
                )

    def values(self) -> jax.Array:
        shape = self.num_outputs, self.num_inputs
        if self.stored.packing == "awq":
            words = self._read("qweight", (shape[1], _words(shape[0])), (self.inputs, _packed(self.outputs)))
            return _unpacked(words, cut=_cut(self.outputs), order=_ALTERNATING, turned=True, dtype=INT4)
        if self.stored.packing == "compressed-tensors":
            words = self._read("weight_packed", (shape[0], _words(shape[1])), (self.outputs, _packed(self.inputs)))
        else:
            words = self._read("qweight", (_words(shape[1]), shape[0]), (_packed(self.inputs), self.outputs)).T
        return _unpacked(words, cut=_cut(self.inputs), dtype=INT4)

    def scales(self) -> Float[Array, "G F"]:
        name, shape, part = self.stem + "scales", (self.num_groups, self.num_outputs), (self.groups, self.outputs)
        is_turned = self.stored.packing == "compressed-tensors"
        if is_turned:
            name, shape, part = self.stem + "weight_scale", shape[::-1], part[::-1]
        scales = self.checkpoint.read(name, shape, None if self.is_whole else part)
        if scales.dtype.name not in _DTYPES:
            raise ValueError(f"Tensor {name!r} must be one of {', '.join(_DTYPES)}. Got {scales.dtype}.")
        return jnp.asarray(scales.T if is_turned else scales)

    def zero_points(self) -> Int8[Array, "G F"] | None:
        """None where all are the middle, as is announced.

        Raises:
            ValueError: They are not.
        """
        packing, shape, part = self.stored.packing, (self.num_groups, self.num_outputs), (self.groups, self.outputs)
        name = "weight_zero_point" if packing == "compressed-tensors" else "qzeros"
        if not self._has(name):  # compressed-tensors leaves out those that are all 0
            held = (self.groups.stop - self.groups.start, self.outputs.stop - self.outputs.start)
            return None if self.stored.symmetric else jnp.zeros(held, jnp.int8)
        if packing == "compressed-tensors":
            words = self._read(name, (_words(shape[1]), shape[0]), (_packed(part[1]), part[0])).T
        else:
            words = self._read(name, (shape[0], _words(shape[1])), (part[0], _packed(part[1])))
        order, less = (_ALTERNATING if packing == "awq" else None), (_ONES if packing == "gptq" else 0)
        zero_points = _unpacked(words, cut=_cut(part[1]), order=order, less=less, dtype=jnp.int8)
        if not self.stored.symmetric:
            return zero_points
        if bool(jnp.any(zero_points != 0)):
            raise ValueError(
                f"Tensor {self.stem + name!r} must have no zero points but the middle, {_MIDDLE}, as "
                "`quantization_config` announces symmetric weights. Got others."
            )
        return None

    def _has(self, end: str) -> bool:
        return self.checkpoint.dtype(self.stem + end) is not None

    def _read(self, end: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> np.ndarray:
        words = self.checkpoint.read(self.stem + end, shape, None if self.is_whole else part)
        if words.dtype != np.int32:
            raise ValueError(f"Tensor {self.stem + end!r} must be of int32. Got {words.dtype}.")
        return words


def _stem(name: str) -> str:
    return name.removesuffix("weight")


def _words(count: int) -> int:
    """That so many numbers take."""
    return -(-count // _IN_WORD)


def _packed(part: slice) -> slice:
    """The words that some numbers lie in."""
    return slice(part.start // _IN_WORD, _words(part.stop))


def _cut(part: slice) -> tuple[int, int]:
    """The first of the numbers in those words, and how many there are."""
    return part.start % _IN_WORD, part.stop - part.start


@functools.partial(jax.jit, static_argnames=("cut", "order", "less", "turned", "dtype"))
def _unpacked(
    words: Int32[Array, "rows W"],
    *,
    cut: tuple[int, int],
    order: tuple[int, ...] | None = None,
    less: int = 0,
    turned: bool = False,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Numbers along the last axis, 8 less than they are stored; on the device, where four bits take least to bring.

    Args:
        cut: The first of those in the words, and their count.
        order: The place in a word of each of its numbers; as they come if None.
        less: By how much a word is less than its numbers.
        turned: Whether the axes change places in what is returned.
    """
    shifts = jnp.asarray(range(_IN_WORD) if order is None else order, jnp.int32) * _BITS
    wide = jnp.broadcast_to((words + jnp.int32(less))[..., None], (*words.shape, _IN_WORD))
    numbers = ((wide >> jnp.broadcast_to(shifts, wide.shape)) & 15).reshape(words.shape[0], -1)
    own = numbers[:, cut[0] : cut[0] + cut[1]] - _MIDDLE
    return (own.T if turned else own).astype(dtype)
