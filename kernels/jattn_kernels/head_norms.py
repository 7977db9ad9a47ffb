"""Norms of each head of queries and keys, before they turn: what they are, and the formula."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jattn_kernels.shapes.arrays import check_are_arrays, check_axes, check_float, check_layer_index, check_sizes


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadNorms:
    """What each query and key head over its root mean square is multiplied with; `rms_norm` of every head.

    Attributes:
        q_scale, k_scale: Of all query heads, and of all key heads; [H], or [L, H] with `layer_index`. Both None if a
            head over its root mean square is all.
        layer_index: Which row of the scales; may be traced.
        eps: Added to the mean of squares; static.
        offset: What the factor is above the scale; static.
    """

    q_scale: Float[Array, "*L H"] | None = None
    k_scale: Float[Array, "*L H"] | None = None
    layer_index: Int[Array, ""] | int | None = None
    eps: float = dataclasses.field(metadata={"static": True})
    offset: float = dataclasses.field(default=0.0, metadata={"static": True})

    def scales(self) -> tuple[Float[Array, "L H"], Float[Array, "L H"], Int[Array, ""]] | None:
        """Both scales with an axis of layers, and which of these is meant; None if there are none."""
        if self.q_scale is None or self.k_scale is None:
            return None
        q_scale, k_scale = jnp.asarray(self.q_scale), jnp.asarray(self.k_scale)
        if self.layer_index is None:
            return q_scale[None], k_scale[None], jnp.int32(0)
        return q_scale, k_scale, jnp.asarray(self.layer_index, jnp.int32)


def normed_heads(heads: Float[Array, "T heads H"], norms: HeadNorms, *, num_kv_heads: int) -> Float[Array, "T heads H"]:
    """Query and key heads over their root mean square, in float32, in their own dtype at the end; values as they are.

    Args:
        heads: A token's query heads, then `num_kv_heads` key heads, then as many value heads.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    check_are_arrays(heads=heads)
    check_axes("heads", heads, ("T", "heads", "H"))
    check_sizes(num_kv_heads=num_kv_heads)
    check_head_norms(norms, heads.shape[-1])
    return normed(heads, norms, num_kv_heads)


def normed(heads: Float[Array, "T heads H"], norms: HeadNorms, num_kv_heads: int) -> Float[Array, "T heads H"]:
    """`normed_heads` of what has been checked.

    One formula for all heads: XLA makes two kernels of it, and five of one for each part, 4 us a layer on an H200.
    """
    wide = heads.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + norms.eps)
    head = jax.lax.broadcasted_iota(jnp.int32, heads.shape, 1)
    first_key, first_value = heads.shape[1] - 2 * num_kv_heads, heads.shape[1] - num_kv_heads
    scales = norms.scales()
    if scales is not None:
        *stacks, layer = scales
        q_factor, k_factor = (
            jnp.broadcast_to(_factor(stack, layer, norms.offset)[None, None], heads.shape) for stack in stacks
        )
        wide *= jnp.where(head < first_key, q_factor, k_factor)
    return jnp.where(head < first_value, wide.astype(heads.dtype), heads)


def _factor(stack: Float[Array, "L H"], layer: Int[Array, ""], offset: float) -> Float32[Array, " H"]:
    return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False).astype(jnp.float32) + offset


def check_head_norms(norms, head_dim: int) -> None:
    """Checks the norms of heads of so many numbers.

    Raises:
        ValueError: They are no HeadNorms, or a scale is missing or of another shape or dtype.
    """
    if not isinstance(norms, HeadNorms):
        raise ValueError(f"`norms` must be None or HeadNorms. Got {type(norms).__name__}.")
    given = {name: getattr(norms, name) for name in ("q_scale", "k_scale") if getattr(norms, name) is not None}
    if len(given) == 1:
        raise ValueError(f"`norms` must have both scales or none. Got {', '.join(given)} alone.")
    check_are_arrays(**given)
    for name, scale in given.items():
        check_float(name, scale)
        stacked = norms.layer_index is not None
        if scale.shape[-1:] != (head_dim,) or scale.ndim != (2 if stacked else 1):
            raise ValueError(
                f"`{name}` must be {'[L, H]' if stacked else '[H]'} for heads of H = {head_dim} numbers, with "
                f"`layer_index` of `norms` {'' if stacked else 'not '}given. Got {name}.shape={scale.shape}."
            )
        if stacked:
            check_layer_index(norms.layer_index, scale.shape[0])
