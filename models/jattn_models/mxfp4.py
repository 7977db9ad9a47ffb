"""mxfp4: experts in four bits a number with a scale for each 32 inputs (OCP Microscaling Formats 1.0), made numbers.

A kernel [experts, inputs, outputs] is stored as two tensors of bytes: NAME_blocks, [experts, outputs, inputs / 32, 16],
of two inputs a byte, the first in its low bits; and NAME_scales, [experts, outputs, inputs / 32], exponents of two.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jattn.checkpoint import Checkpoint
from jattn.matmul import MXFP4_GROUP as _GROUP
from jattn.matmul import QuantizedKernel, dequantize_mxfp4


def packed_names(name: str) -> tuple[str, str]:
    """What the two tensors of a kernel are called."""
    return f"{name}_blocks", f"{name}_scales"


def read_packed(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], piece: tuple[slice, ...] | None, *, dtype: Any
) -> Float[Array, "E D F"]:
    """A kernel, or a piece of one, in `dtype`; bfloat16 and float32 hold its numbers as they are.

    Args:
        shape: Of the whole kernel.
        piece: A slice of each axis; no more is read than the groups that it has inputs of. None is all.

    Raises:
        ValueError: A tensor is missing, or has another shape or dtype.
    """
    inputs = slice(0, shape[1]) if piece is None else piece[1]
    blocks, scales = _read(checkpoint, name, shape, piece)
    return _unpacked(blocks, scales, first=inputs.start % _GROUP, count=inputs.stop - inputs.start, dtype=dtype)


def _read(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], piece: tuple[slice, ...] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks and scales, of the groups that a piece has inputs of."""
    experts, inputs, outputs = (slice(0, length) for length in shape) if piece is None else piece
    groups = slice(inputs.start // _GROUP, -(-inputs.stop // _GROUP))
    of_scales = (shape[0], shape[2], -(-shape[1] // _GROUP))
    own = None if piece is None else (experts, outputs, groups)
    blocks_name, scales_name = packed_names(name)
    blocks = checkpoint.read(blocks_name, (*of_scales, _GROUP // 2), own and (*own, slice(0, _GROUP // 2)))
    scales = checkpoint.read(scales_name, of_scales, own)
    for each, tensor in ((blocks_name, blocks), (scales_name, scales)):
        if tensor.dtype != np.uint8:
            raise ValueError(f"Tensor {each!r} must be of bytes, uint8. Got {tensor.dtype}.")
    return blocks, scales


def read_bytes(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], piece: tuple[slice, ...] | None
) -> QuantizedKernel:
    """A kernel, or a piece of one with whole groups, as it is stored; scales with their groups first.

    Raises:
        ValueError: As `read_packed`.
    """
    blocks, scales = _read(checkpoint, name, shape, piece)
    return QuantizedKernel(values=jnp.asarray(blocks.reshape(*blocks.shape[:2], -1)), scales=_groups_first(scales))


_groups_first = jax.jit(functools.partial(jnp.swapaxes, axis1=1, axis2=2))


@functools.partial(jax.jit, static_argnames=("first", "count", "dtype"))
def _unpacked(
    blocks: UInt8[Array, "E F groups 16"], scales: UInt8[Array, "E F groups"], *, first: int, count: int, dtype: Any
) -> Float[Array, "E D F"]:
    """On the device, where four bits take an eighth of float32's bytes to bring."""
    rows = dequantize_mxfp4(blocks.reshape(*blocks.shape[:2], -1), jnp.swapaxes(scales, 1, 2), dtype)
    return jnp.swapaxes(rows[..., first : first + count], 1, 2)
