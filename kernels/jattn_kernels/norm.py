"""Root-mean-square norm of rows, by a scale that may lie in a stack of those of all layers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jattn_kernels.call import default_device
from jattn_kernels.mosaic.sm90 import rms_norm as sm90
from jattn_kernels.shapes import check_are_arrays, check_float, check_layer_index

_HOPPER = (9, 0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def _norm(x, scale, layer_index, eps, offset, implementation):
    if implementation == "mosaic":
        return sm90.rms_norm(x, scale, layer_index, eps=eps, offset=offset)
    return _in_xla(x, scale, layer_index, eps, offset)


@_norm.defjvp
def _norm_jvp(eps, offset, implementation, primals, tangents):
    del implementation
    return jax.jvp(lambda x, scale, layer: _in_xla(x, scale, layer, eps, offset), primals, tangents)


def _in_xla(x, scale, layer_index, eps, offset):
    scale = lax.dynamic_index_in_dim(scale, layer_index, keepdims=False)
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * jnp.broadcast_to(scale.astype(jnp.float32) + offset, x.shape)).astype(x.dtype)


def rms_norm(
    x: Float[Array, "*rows D"],
    scale: Float[Array, "..."],
    *,
    eps: float,
    offset: float = 0.0,
    layer_index: Int[Array, ""] | int | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows D"]:
    """x over the root of the mean of its squares, times (scale + offset); in float32, in x's dtype at the end.

    A kernel of its own on Hopper: XLA first copies a layer's scale out of the stack.

    Args:
        scale: [D], or [L, D] with `layer_index`.
        eps: Added to the mean.
        layer_index: Which row of `scale`; may be traced.
        implementation: Which one to use; None takes the kernel where there is one.

    Raises:
        ValueError: A shape is wrong, or `implementation` is unknown.
        NotImplementedError: There is no kernel for this size, dtype or device.
    """
    check_are_arrays(x=x, scale=scale)
    check_float("x", x)
    check_float("scale", scale)
    stacked = scale.ndim == 2
    if stacked != (layer_index is not None) or scale.ndim not in (1, 2) or scale.shape[-1] != x.shape[-1]:
        raise ValueError(
            "`scale` must be [D] for rows of D numbers, or [L, D] and `layer_index` given. "
            f"Got x.shape={x.shape}, scale.shape={scale.shape}, layer_index={None if layer_index is None else 'given'}."
        )
    if layer_index is not None:
        check_layer_index(layer_index, scale.shape[0])
    if implementation not in (None, "mosaic", "xla"):
        raise ValueError(f"`implementation` must be mosaic, xla or None. Got {implementation!r}.")
    if implementation != "xla":
        refusal = _refusal(x, scale)
        if refusal is not None and implementation == "mosaic":
            raise NotImplementedError(refusal)
        implementation = "xla" if refusal is not None else "mosaic"
    layer = jnp.asarray(0 if layer_index is None else layer_index, jnp.int32)
    rows = x.reshape(-1, x.shape[-1])
    out: Any = _norm(rows, scale if stacked else scale[None], layer, eps, offset, implementation)
    return out.reshape(x.shape)


def _refusal(x: Array, scale: Array) -> str | None:
    """Why there is no kernel for a call, or None."""
    if default_device().compute_capability != _HOPPER:
        return "`mosaic` has kernels for compute capability 9.0 (Hopper) only."
    if x.size == 0 or not sm90.takes(x.shape[-1], x.dtype, scale.dtype):
        return (
            "`mosaic` takes some rows of 1,024 to 8,192 numbers, a multiple of 1,024, of bfloat16 or float16. "
            f"Got x of {x.shape} {x.dtype.name}, scale of {scale.dtype.name}."
        )
    return None
