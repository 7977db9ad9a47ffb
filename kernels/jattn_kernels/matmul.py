"""Products with weights, which may lie in a stack of those of all layers: few rows wait for memory alone."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import MatmulCall
from jattn_kernels.dispatch import choose, serves
from jattn_kernels.implementation import Implementation
from jattn_kernels.norm import check_additions, packed_norm, summed_and_normed
from jattn_kernels.operands import MatmulOperands
from jattn_kernels.packed_product import packed_product, product_bias
from jattn_kernels.quantized import QuantizedKernel, QuantizedRows
from jattn_kernels.splits import Splits, added
from jattn_kernels.unattended import Unattended
from jattn_kernels.unattended_latents import UnattendedLatents
from jattn_kernels.ungated import Ungated, gated
from jattn_kernels.unmultiplied import Unmultiplied
from jattn_kernels.unnormed import Unnormed
from jattn_kernels.xla.implementation import XLA


def matmul(
    x: Float[Array, "*rows D"] | Ungated | QuantizedRows,
    kernel: Float[Array, "*L D F"] | QuantizedKernel,
    *,
    layer_index: Int[Array, ""] | int | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "*rows F"]:
    """x @ kernel, summed in float32; float32 is not rounded to less on the way.

    Kernels of their own on Hopper, which read the weights where they lie: for up to 8 rows, with weights in fp8, and
    for up to 256 rows with weights in int4.

    With a quantised kernel the rows are quantised too, each by a scale of its own (`quantize_rows`), or each part of a
    row by its own where the kernel's blocks divide the depth. Sums are multiplied with both scales, and cast once.

    Such a kernel also takes the activation of rows that are `Ungated`, as it rounds them; else it is taken before. Rows
    that are rounded already, QuantizedRows, are for a kernel with a scale for each output channel.

    With a kernel in int4 rows stay as they are, and weights are dequantised to their dtype on the way.

    Args:
        kernel: [D, F], or [L, D, F] with `layer_index`; a QuantizedKernel [F, D], or [L, F, D].
        layer_index: Which of the stack's layers; may be traced.
        out_dtype: Of the result; x's if None.
        implementation: Which one to use; None takes the kernel where it serves the call.

    Raises:
        ValueError: A shape or dtype is wrong, or `implementation` is unknown.
        NotImplementedError: The implementation that was asked for does not serve the call.
    """
    call, operands = packed_product(x, kernel, layer_index, out_dtype, implementation)
    out: Any = _product(choose(call, implementation).implementation, call, operands)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def matmul_splits(
    x: Float[Array, "T D"] | Unnormed | Ungated | QuantizedRows,
    kernel: Float[Array, "*L D F"] | QuantizedKernel,
    *,
    bias: Float[Array, "*L F"] | None = None,
    layer_index: Int[Array, ""] | int | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "T F"] | Splits:
    """`matmul`, or what adds up to it, where a kernel splits the depth: for who can add it up while reading it.

    Such a kernel also takes the norm of rows that are not normed yet, while it waits for the weights; one row may be
    added up there too.

    Args:
        bias: Added to each row: by such a kernel before the sum is rounded, else after.

    Raises:
        ValueError, NotImplementedError: As `matmul`.
    """
    return _in_splits(x, kernel, bias, layer_index, out_dtype, implementation)[0]


def matmul_splits_of_sum(
    x: Unnormed,
    kernel: Float[Array, "*L D F"] | QuantizedKernel,
    *,
    bias: Float[Array, "*L F"] | None = None,
    layer_index: Int[Array, ""] | int | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T F"] | Splits, Float[Array, "T D"], Float[Array, "T D"]]:
    """`matmul_splits` of rows that are added up, their sum, and its norm.

    Raises:
        ValueError, NotImplementedError: As `matmul`.
    """
    _check_of_sum(x)
    product, rows = _in_splits(x, kernel, bias, layer_index, out_dtype, implementation)
    assert rows is not None
    return product, *rows


def matmul_gated(
    x: Float[Array, "T D"] | QuantizedRows,
    kernel: Float[Array, "*L D F2"] | QuantizedKernel,
    activation: Callable[[Array, Array], Array],
    *,
    layer_index: Int[Array, ""] | int | None = None,
    implementation: str | None = None,
) -> Float[Array, "T F"] | Ungated:
    """activation(gate, up) of a product's columns, the gate's first; Ungated where no kernel takes it with the product.

    On Hopper one does for many rows, in float32, and stores the result alone. The one for weights in int4 does for 64
    rows, and rounds both halves first.

    Args:
        activation: Elementwise and hashable.

    Raises:
        ValueError, NotImplementedError: As `matmul`.
    """
    call, operands = packed_product(x, kernel, layer_index, None, implementation, gate=activation)
    if not serves(call, implementation):
        rows = matmul_splits(x, kernel, layer_index=layer_index, implementation=implementation)
        return Ungated(rows=rows, activation=activation)
    return _product(choose(call, implementation).implementation, call, operands)


def matmul_gated_of_sum(
    x: Unnormed,
    kernel: Float[Array, "*L D F2"] | QuantizedKernel,
    activation: Callable[[Array, Array], Array],
    *,
    layer_index: Int[Array, ""] | int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T F"] | Ungated, Float[Array, "T D"], Float[Array, "T D"]]:
    """`matmul_gated` of rows that are added up, their sum, and its norm.

    On Hopper a kernel does it all for one row and weights in int4.

    Raises:
        ValueError, NotImplementedError: As `matmul`.
    """
    _check_of_sum(x)
    if all(isinstance(addition, Splits) for addition in x.additions):
        call, operands = packed_product(x.rows, kernel, layer_index, None, implementation, gate=activation)
        norm_call, norm = packed_norm(x.rows, x.scale, x.eps, x.offset, x.layer_index, x.additions)
        call = dataclasses.replace(call, norm=norm_call)
        if serves(call, implementation):
            operands = dataclasses.replace(operands, norm=norm)
            return _product(choose(call, implementation).implementation, call, operands)
    options: dict[str, Any] = {"layer_index": layer_index, "implementation": implementation}
    rows, total, normed = matmul_splits_of_sum(x, kernel, **options)
    return Ungated(rows=rows, activation=activation), total, normed


def _check_of_sum(x: Any) -> None:
    """Raises if x is not what is added up before a product."""
    if not isinstance(x, Unnormed) or not x.additions:
        got = "none" if isinstance(x, Unnormed) else type(x).__name__
        raise ValueError(f"`x` must be Unnormed, with some `additions`. Got {got}: use `matmul_splits`.")
    check_additions(x)


def adds_up(x: Unnormed, kernel: Float[Array, "*L D F"] | QuantizedKernel, *, layer_index: Any = None) -> bool:
    """Whether a product's kernel adds such rows up, so that it costs next to nothing if another product does too."""
    if not x.additions or not all(isinstance(addition, Splits) for addition in x.additions):
        return False
    call, _ = packed_product(x.rows, kernel, layer_index, None, None, in_splits=True)
    norm, _ = packed_norm(x.rows, x.scale, x.eps, x.offset, x.layer_index, x.additions)
    return serves(dataclasses.replace(call, norm=norm), None)


def _in_splits(
    x: Any, kernel: Any, bias: Any, layer_index: Any, out_dtype: Any, implementation: str | None
) -> tuple[Float[Array, "T F"] | Splits, tuple[Float[Array, "T D"], Float[Array, "T D"]] | None]:
    """The product; and of rows that were added up their sum, and its norm."""
    rows = x.rows if isinstance(x, Unnormed) else x
    call, operands = packed_product(rows, kernel, layer_index, out_dtype, implementation, in_splits=True)
    if rows.ndim != 2:
        raise ValueError(f"`x` must be [T, D]. Got x.shape={rows.shape}.")
    of_sum: Any = None
    addition = None if bias is None else product_bias(bias, call.columns, operands, layer_index)
    if addition is not None and serves(dataclasses.replace(call, biased=True), implementation):
        call, operands = dataclasses.replace(call, biased=True), dataclasses.replace(operands, bias=addition)
    if isinstance(x, Unnormed):
        check_additions(x)
        adds = all(isinstance(addition, Splits) for addition in x.additions)
        norm_call, norm = packed_norm(rows, x.scale, x.eps, x.offset, x.layer_index, x.additions if adds else ())
        call, operands = dataclasses.replace(call, norm=norm_call), dataclasses.replace(operands, norm=norm)
        if not adds or not serves(call, implementation):
            of_sum = summed_and_normed(x, implementation=implementation)
            call, operands = dataclasses.replace(call, norm=None), dataclasses.replace(operands, x=of_sum[1], norm=None)
    out: Any = _product(choose(call, implementation).implementation, call, operands)
    if call.norm is not None and call.norm.of_sum:
        out, total, normed = out
        of_sum = total, normed
    if addition is not None and not call.biased:
        out = with_bias(added(out), jax.lax.dynamic_index_in_dim(addition, operands.layer_index, keepdims=False))
    return out, of_sum


def multiplied(
    x: Float[Array, "T F"] | Splits | Unmultiplied, *, implementation: str | None = None
) -> Float[Array, "T F"] | Splits:
    """The product that is meant, by `matmul_splits`; of what is none, that itself."""
    if not isinstance(x, Unmultiplied):
        return x
    if isinstance(x.rows, Unattended):
        raise ValueError("What is multiplied here may not be Unattended. Give `attended` of it.")
    if isinstance(x.rows, UnattendedLatents):
        raise ValueError("What is multiplied here may not be UnattendedLatents. Give `attended_latents` of it.")
    options: dict[str, Any] = {"layer_index": x.layer_index, "implementation": implementation}
    return matmul_splits(x.rows, x.kernel, bias=x.bias, **options)


def with_bias(product: Float[Array, "*rows F"], bias: Float[Array, " F"]) -> Float[Array, "*rows F"]:
    """A product's rows with a bias added to each.

    Behind a barrier: a bias of a layer that cuBLAS adds makes XLA copy the layer's weights out of their stack first,
    29 MB a product of gpt-oss-20b's.
    """
    product = jax.lax.optimization_barrier(product)
    return product + jnp.broadcast_to(bias.astype(product.dtype), product.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product(implementation: Implementation, call: MatmulCall, operands: MatmulOperands) -> Any:
    return implementation.run(call, operands)


@_product.defjvp
def _product_jvp(implementation, call, primals, tangents):
    if call.in_splits and implementation is not XLA:
        raise NotImplementedError(
            "`matmul_splits` has no derivative: it is for steps that serve. Use `matmul`, or implementation='xla'."
        )
    if call.scales is not None:
        raise NotImplementedError(
            "A product with quantised weights has no derivative. Train with weights that are not quantised."
        )

    def product(operands: MatmulOperands) -> Any:
        out = XLA.run(dataclasses.replace(call, gate=None), operands)
        return out if call.gate is None else gated(Ungated(rows=out, activation=call.gate))

    return jax.jvp(product, primals, tangents)
