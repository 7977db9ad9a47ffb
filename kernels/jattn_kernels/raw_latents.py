"""RawLatents: latent rows as their projection gives them, and what makes them what pages hold."""

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jattn_kernels.norm_formula import norm_of_rows
from jattn_kernels.rotation import check_angles, rotated
from jattn_kernels.shapes.arrays import check_are_arrays, check_axes, check_float, check_layer_index
from jattn_kernels.splits import Splits, added


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class RawLatents:
    """Rows of [compressed KV, key that all heads share], of which the first are to be normed and the others to turn.

    Attributes:
        rows: One a token, or what adds up to them; perhaps behind other numbers of the token.
        scale: Of the norm of the compressed part; its width is that part's.
        layer_index: Which row of `scale`, if that has layers; may be traced.
        cos, sin: Of the angle of each pair (i, i + R / 2) of the shared key.
        eps: Added to the mean of squares; static.
        begin: How many other numbers stand before each; static.
    """

    rows: Float[Array, "T _"] | Splits
    scale: Float[Array, "*L C"]
    layer_index: Int[Array, ""] | int | None = None
    cos: Float32[Array, "T half"]
    sin: Float32[Array, "T half"]
    eps: float = dataclasses.field(metadata={"static": True})
    begin: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def dtype(self) -> Any:
        """Of the rows."""
        return self.rows.dtype

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.rows.shape[1] - self.begin

    @property
    def compressed(self) -> int:
        """Numbers of the compressed part."""
        return self.scale.shape[-1]

    def scales(self) -> tuple[Float[Array, "L C"], Int[Array, ""]]:
        """The scales with an axis of layers, and which of these is meant."""
        scale = jnp.asarray(self.scale)
        if self.layer_index is None:
            return scale[None], jnp.int32(0)
        return scale, jnp.asarray(self.layer_index, jnp.int32)

    def made(self) -> Float[Array, "T W"]:
        """The rows that pages hold."""
        c_kv, k_pe = jnp.split(added(self.rows)[:, self.begin :], (self.compressed,), axis=-1)
        c_kv = norm_of_rows(c_kv, *self.scales(), eps=self.eps, offset=0.0)
        return jnp.concatenate([c_kv, rotated(k_pe[:, None], self.cos, self.sin)[:, 0]], axis=-1)


def check_raw_latents(latents: RawLatents) -> None:
    """Checks rows that are to be made.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    rows, scale = latents.rows, latents.scale
    check_are_arrays(scale=scale, cos=latents.cos, sin=latents.sin)
    if not isinstance(rows, Splits):
        check_are_arrays(rows=rows)
        check_float("rows", rows)
    check_axes("rows", rows, ("T", "W"))
    has_layers = latents.layer_index is not None
    check_axes("scale", scale, ("L", "C") if has_layers else ("C",))
    if has_layers:
        check_layer_index(latents.layer_index, scale.shape[0])
    if not 0 <= latents.begin < rows.shape[1]:
        raise ValueError(f"`begin` must be a column of the rows. Got begin={latents.begin}, rows.shape={rows.shape}.")
    turned = latents.width - latents.compressed
    if turned < 2 or turned != 2 * latents.cos.shape[-1]:
        raise ValueError(
            "`scale` must be of the compressed part of the rows, and `cos` of all pairs of the rest. "
            f"Got scale.shape={scale.shape}, cos.shape={latents.cos.shape}, rows.shape={rows.shape}, "
            f"begin={latents.begin}."
        )
    check_angles(latents.cos, latents.sin, "rows", jax.ShapeDtypeStruct((rows.shape[0], 1, turned), latents.dtype))
