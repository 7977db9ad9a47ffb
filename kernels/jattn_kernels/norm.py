"""Root-mean-square norm of rows, by a scale that may lie in a stack of those of all layers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import NormCall, modes_of
from jattn_kernels.dispatch import choose
from jattn_kernels.implementation import Implementation
from jattn_kernels.norm_formula import norm_of_rows
from jattn_kernels.operands import NormOperands
from jattn_kernels.shapes.arrays import check_are_arrays, check_float, check_layer_index


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
    if x.ndim < 1 or stacked != (layer_index is not None) or scale.ndim not in (1, 2) or scale.shape[-1] != x.shape[-1]:
        raise ValueError(
            "`scale` must be [D] for rows of D numbers, or [L, D] and `layer_index` given. "
            f"Got x.shape={x.shape}, scale.shape={scale.shape}, layer_index={None if layer_index is None else 'given'}."
        )
    if layer_index is not None:
        check_layer_index(layer_index, scale.shape[0])
    layer = jnp.asarray(0 if layer_index is None else layer_index, jnp.int32)
    operands = NormOperands(
        x=jnp.asarray(x).reshape(-1, x.shape[-1]),
        scale=jnp.asarray(scale) if stacked else jnp.asarray(scale)[None],
        layer_index=layer,
    )
    call = NormCall(
        num_rows=operands.x.shape[0],
        columns=x.shape[-1],
        dtype=x.dtype.name,
        scale_dtype=scale.dtype.name,
        eps=eps,
        offset=offset,
        modes=modes_of(operands),
    )
    out: Any = _norm(choose(call, implementation).implementation, call, operands)
    return out.reshape(x.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _norm(implementation: Implementation, call: NormCall, operands: NormOperands) -> Float[Array, "T D"]:
    return implementation.run(call, operands)


@_norm.defjvp
def _norm_jvp(implementation, call, primals, tangents):
    del implementation
    formula = functools.partial(norm_of_rows, eps=call.eps, offset=call.offset)
    at, along = ((each.x, each.scale, each.layer_index) for (each,) in (primals, tangents))
    return jax.jvp(formula, at, along)
