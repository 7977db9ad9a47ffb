"""The rotary embedding inside the kernel: rows rotated by their absolute positions."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def angles(position: Int[Array, "*rows"], width: int, *, theta: float, scale: float) -> Float[Array, "*rows half"]:
    """The angle of each pair of a row of `width` numbers: (position / scale) * theta^(-2 i / width)."""
    steps = turns_per_position(width, theta=theta, scale=scale)
    steps = jnp.broadcast_to(jnp.asarray(steps), (*position.shape, width // 2))
    return (position[..., None] * steps).astype(jnp.float32) * np.float32(math.tau / 2**32)


def turns_per_position(width: int, *, theta: float, scale: float) -> np.ndarray:
    """Of each pair the angle of one position, in 2^-32 turns: int32, whose products wrap as angles do.

    Exact far beyond where float32 positions blur them.
    """
    turns = theta ** (-2.0 * np.arange(width // 2) / width) / scale / math.tau
    return np.round(turns % 1.0 * 2**32).astype(np.uint64).astype(np.uint32).view(np.int32)


def shrink_of(kv_dtype: Any) -> float:
    """What rotated keys are divided by to stay in float16: those of e5m2 reach 57,344, and rotated 1.4 times that."""
    return 2.0 if kv_dtype == jnp.float8_e5m2 else 1.0


def rotate(
    x: Float[Array, "W S K H"], position: Int[Array, "W S"], *, theta: float, scale: float, shrink: float = 1.0
) -> Float[Array, "W S K H"]:
    """Pairs (i, i + H / 2) of each row rotated by their angles and divided by `shrink`, in float32."""
    angle = angles(position, x.shape[-1], theta=theta, scale=scale)[:, :, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32) / shrink, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
