"""Rotary embedding of rows by given angles."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jattn_kernels.shapes.arrays import check_are_arrays, check_axes


def rotate(
    x: Float[Array, "T heads H"], cos: Float32[Array, "T half"], sin: Float32[Array, "T half"]
) -> Float[Array, "T heads H"]:
    """Pairs (i, i + half) of each head turned by their angles, in float32; what lies past the pairs stays.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    check_are_arrays(x=x, cos=cos, sin=sin)
    check_axes("x", x, ("T", "heads", "H"))
    check_angles(cos, sin, "x", x)
    return rotated(x, cos, sin)


def rotated(
    x: Float[Array, "T heads H"], cos: Float32[Array, "T half"], sin: Float32[Array, "T half"]
) -> Float[Array, "T heads H"]:
    """`rotate` of what has been checked."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def check_angles(cos, sin, name: str, rows) -> None:
    """Checks the angles of the rows of an array [T, heads, H], called `name`.

    Raises:
        ValueError: They are not float32 [T, half], or more than a head has pairs.
    """
    num_tokens, _, head_dim = rows.shape
    half = cos.shape[-1] if cos.ndim else 0
    if 2 * half > head_dim:
        raise ValueError(
            f"`cos` must have at most one value a pair of a head. Got cos.shape={cos.shape}, {name}.shape={rows.shape}."
        )
    for angle_name, angle in (("cos", cos), ("sin", sin)):
        if angle.shape != (num_tokens, half) or angle.dtype != jnp.float32:
            raise ValueError(
                f"`{angle_name}` must be float32 with a row a token of `{name}`: {(num_tokens, half)}. "
                f"Got {angle_name}.shape={angle.shape}, {angle_name}.dtype={angle.dtype}."
            )
