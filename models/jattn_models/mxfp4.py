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

_GROUP = 32  # inputs that share a scale
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # of e2m1's codes


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
    first = inputs.start - groups.start * _GROUP
    return _unpacked(blocks, scales, first=first, count=inputs.stop - inputs.start, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("first", "count", "dtype"))
def _unpacked(
    blocks: UInt8[Array, "E F groups 16"], scales: UInt8[Array, "E F groups"], *, first: int, count: int, dtype: Any
) -> Float[Array, "E D F"]:
    """On the device, where four bits take an eighth of float32's bytes to bring."""
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, _GROUP)
    powers = jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)  # 2**-127, the least, is 0
    rows = (jnp.asarray(_VALUES)[codes] * powers[..., None]).reshape(*scales.shape[:2], -1)
    return jnp.swapaxes(rows[..., first : first + count], 1, 2).astype(dtype)
