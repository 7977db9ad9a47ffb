"""Root-mean-square norm of rows, by a scale that may lie in a stack of those of all layers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import NormCall, modes_of
from jattn_kernels.dispatch import choose, serves
from jattn_kernels.implementation import Implementation
from jattn_kernels.norm_formula import norm_of_rows
from jattn_kernels.operands import NormOperands
from jattn_kernels.quantized import NormedRows, QuantizedRows
from jattn_kernels.shapes.arrays import check_are_arrays, check_float, check_layer_index
from jattn_kernels.splits import Splits, added
from jattn_kernels.ungated import Ungated, gated
from jattn_kernels.unmultiplied import Unmultiplied
from jattn_kernels.unnormed import Unnormed


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
    call, operands = packed_norm(x, scale, eps, offset, layer_index)
    out: Any = _norm(choose(call, implementation).implementation, call, operands)
    return out.reshape(x.shape)


def add_rms_norm(
    x: Float[Array, "T D"],
    addition: Float[Array, "T D"] | Splits,
    scale: Float[Array, "..."],
    *,
    eps: float,
    offset: float = 0.0,
    layer_index: Int[Array, ""] | int | None = None,
    rounded: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "T D"], NormedRows]:
    """x + addition, and the `rms_norm` of that; one kernel where the addition comes in splits.

    Args:
        rounded: Whether the norm may be rounded to fp8 where that kernel does it, for a product that would.

    Raises:
        ValueError: A shape or dtype is wrong, or `implementation` is unknown.
        NotImplementedError: There is no kernel for this size, dtype or device.
    """
    given = Unnormed(rows=x, additions=(addition,), scale=scale, layer_index=layer_index, eps=eps, offset=offset)
    return summed_and_normed(given, rounded=rounded, implementation=implementation)


def summed_and_normed(
    x: Unnormed, *, rounded: bool = False, implementation: str | None = None
) -> tuple[Float[Array, "T D"], NormedRows]:
    """The rows with all that is added to them, and as they are read: normed.

    Args:
        rounded: As of `add_rms_norm`.
    """
    check_additions(x)
    options: dict[str, Any] = {"layer_index": x.layer_index, "implementation": implementation}
    if x.additions and all(isinstance(addition, Splits) for addition in x.additions):
        call, operands = packed_norm(x.rows, x.scale, x.eps, x.offset, x.layer_index, x.additions)
        if rounded and serves(dataclasses.replace(call, rounded=True), implementation):
            call = dataclasses.replace(call, rounded=True)
        if serves(call, implementation):
            return choose(call, implementation).implementation.run(call, operands)
    additions: tuple[Any, ...] = x.additions
    total = functools.reduce(lambda rows, addition: rows + added(addition), additions, x.rows)
    return total, rms_norm(total, x.scale, eps=x.eps, offset=x.offset, **options)


def check_additions(x: Unnormed, *, products: bool = False) -> None:
    """Raises if what is added to rows is not as they are.

    Args:
        products: Whether one that is Unmultiplied is taken.

    Raises:
        ValueError: A shape or dtype is wrong, or a product is not taken.
    """
    for addition in x.additions:
        if isinstance(addition, Unmultiplied) and not products:
            raise ValueError("What is added to rows here may not be Unmultiplied. Give `multiplied` of it.")
        check_are_arrays(x=x.rows, addition=addition)
        if x.ndim != 2 or addition.shape != x.shape or addition.dtype != x.dtype:
            raise ValueError(
                "`x` and `addition` must be [T, D] of one dtype. "
                f"Got x.shape={x.shape} of {x.dtype}, addition.shape={addition.shape} of {addition.dtype}."
            )


def taken(x: Float[Array, "..."] | Unnormed | Ungated, *, implementation: str | None = None) -> Float[Array, "..."]:
    """The rows as they are read: added up and normed, or activated."""
    if not isinstance(x, Unnormed):
        return gated(x)
    normed = summed_and_normed(x, implementation=implementation)[1]
    assert not isinstance(normed, QuantizedRows)
    return normed


def packed_norm(
    x: Any, scale: Any, eps: float, offset: float, layer_index: Any, additions: tuple[Any, ...] = ()
) -> tuple[NormCall, NormOperands]:
    """The call of a norm and its operands, once they are checked."""
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
        additions=additions,
    )
    call = NormCall(
        num_rows=operands.x.shape[0],
        columns=x.shape[-1],
        dtype=x.dtype.name,
        scale_dtype=scale.dtype.name,
        eps=eps,
        offset=offset,
        of_sum=bool(additions),
        modes=modes_of(operands),
    )
    return call, operands


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _norm(implementation: Implementation, call: NormCall, operands: NormOperands) -> Float[Array, "T D"]:
    return implementation.run(call, operands)


@_norm.defjvp
def _norm_jvp(implementation, call, primals, tangents):
    del implementation
    formula = functools.partial(norm_of_rows, eps=call.eps, offset=call.offset)
    at, along = ((each.x, each.scale, each.layer_index) for (each,) in (primals, tangents))
    return jax.jvp(formula, at, along)
