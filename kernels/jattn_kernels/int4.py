"""Weights in int4 with a scale for each group of inputs of an output: rounded to that, and what they stand for."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Shaped

from jattn_kernels.interleaved import in_turn, interleaved
from jattn_kernels.quantized import INT4, QuantizedKernel
from jattn_kernels.shapes.arrays import FLOATS, check_are_arrays, check_sizes

_LEAST, _MOST = -8, 7
_STARTS = (-8.5, -8.0, -7.5, -7.0, -6.0)  # what a group's largest number is first taken for
_NEXT_TO_NOTHING = 2.0**-100  # a group of smaller numbers is one of zeros


def quantize_groups(kernel: Float[Array, "*L F D"], group_size: int) -> QuantizedKernel:
    """Weights with a scale for each group of inputs, in bfloat16, and without zero points.

    A group's largest number is taken for one of several; the scale is then the one of least squares for the numbers
    that come of it, and the best of these scales is kept. It may be negative, as there are more negative numbers than
    positive ones. A group with NaN or infinity becomes NaN.

    Args:
        kernel: Outputs first.
        group_size: Inputs that share a scale; must divide D.

    Raises:
        ValueError: `kernel` is no array of float32, bfloat16 or float16 with two axes, or `group_size` does not fit it.
    """
    check_are_arrays(kernel=kernel)
    if kernel.dtype.name not in FLOATS or kernel.ndim < 2:
        raise ValueError(
            f"`kernel` must be [..., F, D] of {', '.join(FLOATS)}. "
            f"Got kernel.shape={kernel.shape}, kernel.dtype={kernel.dtype}."
        )
    check_sizes(group_size=group_size)
    if kernel.shape[-1] % group_size:
        raise ValueError(
            f"`group_size` must divide the depth of `kernel`. Got group_size={group_size}, kernel.shape={kernel.shape}."
        )
    groups = kernel.astype(jnp.float32).reshape(*kernel.shape[:-1], -1, group_size)
    largest = jnp.take_along_axis(groups, jnp.argmax(jnp.abs(groups), axis=-1, keepdims=True), axis=-1)
    is_nothing = jnp.abs(largest) < _NEXT_TO_NOTHING
    scales, least = jnp.ones_like(largest), jnp.full_like(largest, jnp.inf)
    for start in _STARTS:
        tried = _fitted(groups, largest * (1 / start), is_nothing)
        off = jnp.sum(jnp.square(_rounded(groups, tried) * tried - groups), axis=-1, keepdims=True)
        scales, least = jnp.where(off >= least, scales, tried), jnp.where(off >= least, least, off)
    values = _rounded(groups, scales).reshape(kernel.shape).astype(INT4)
    return QuantizedKernel(values=values, scales=jnp.swapaxes(scales[..., 0], -1, -2).astype(jnp.bfloat16))


def interleave(kernel: QuantizedKernel) -> QuantizedKernel:
    """Weights in int4 with their inputs in the order in which Hopper's kernel multiplies them fastest.

    As they are if their groups are of no multiple of 32 inputs, or if they lie so already.
    """
    if kernel.interleaved or not kernel.may_be_interleaved:
        return kernel
    return dataclasses.replace(kernel, values=interleaved(kernel.values), interleaved=True)


def dequantize_groups(kernel: QuantizedKernel, dtype: Any) -> Float[Array, "*L F D"]:
    """What weights in int4 stand for, computed in float32 and rounded once."""
    *outputs, depth = kernel.values.shape
    values = in_turn(kernel.values) if kernel.interleaved else kernel.values
    values = values.astype(jnp.float32).reshape(*outputs, kernel.scales.shape[-2], -1)

    def of_each(groups: Shaped[Array, "*L G F"]) -> Float32[Array, "*L F G g"]:
        return jnp.broadcast_to(jnp.swapaxes(groups, -1, -2).astype(jnp.float32)[..., None], values.shape)

    if kernel.zero_points is not None:
        values -= of_each(kernel.zero_points)
    return (values * of_each(kernel.scales)).reshape(*outputs, depth).astype(dtype)


def _fitted(
    groups: Float32[Array, "*L F G g"], scales: Float32[Array, "*L F G 1"], is_nothing: Bool[Array, "*L F G 1"]
) -> Float32[Array, "*L F G 1"]:
    """The scales of least squares for the numbers that groups are rounded to with some scales; as bfloat16 has them."""
    values = _rounded(groups, jnp.where(is_nothing, 1.0, scales))
    products, squares = (jnp.sum(values * each, axis=-1, keepdims=True) for each in (groups, values))
    return jnp.where(is_nothing, 1.0, products / squares).astype(jnp.bfloat16).astype(jnp.float32)


def _rounded(groups: Float32[Array, "*L F G g"], scales: Float32[Array, "*L F G 1"]) -> Float32[Array, "*L F G g"]:
    return jnp.clip(jnp.round(groups / jnp.broadcast_to(scales, groups.shape)), _LEAST, _MOST)
