"""The calls of products with weights and their operands, packed once at their faces."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.call import MatmulCall, modes_of
from jattn_kernels.dispatch import serves
from jattn_kernels.operands import MatmulOperands
from jattn_kernels.quantized import QuantizedKernel, QuantizedRows, check_quantized
from jattn_kernels.shapes.arrays import FLOATS, check_are_arrays, check_float, check_layer_index, same_dtype
from jattn_kernels.splits import Splits
from jattn_kernels.ungated import Ungated, gated

_ROUNDED = "Rows that are QuantizedRows need a QuantizedKernel in fp8 with scales of output channels."


def packed_product(
    x: Any, kernel: Any, layer_index: Any, out_dtype: Any, implementation: str | None, **facts: Any
) -> tuple[MatmulCall, MatmulOperands]:
    """A call and its operands, once they are checked; x's activation is the call's where a kernel takes it."""
    if not isinstance(x, Ungated):
        return _packed_of(x, kernel, layer_index, out_dtype, **facts)
    call, operands = _packed_of(gated(x), kernel, layer_index, out_dtype, **facts)
    lazy = dataclasses.replace(call, activation=x.activation)
    if isinstance(x.rows, Splits) or not serves(lazy, implementation):
        return call, operands
    return lazy, dataclasses.replace(operands, x=x.rows)


def _packed_of(
    x: Any, kernel: Any, layer_index: Any, out_dtype: Any, **facts: Any
) -> tuple[MatmulCall, MatmulOperands]:
    operands = product_operands(x, kernel, layer_index)
    rows = x if isinstance(x, QuantizedRows) else operands.x
    out_dtype = jnp.dtype(rows.dtype if out_dtype is None else out_dtype)
    if out_dtype.name not in FLOATS:
        raise ValueError(f"`out_dtype` must be one of {', '.join(FLOATS)}. Got out_dtype={out_dtype.name!r}.")
    num_rows, depth = rows.shape
    call = MatmulCall(
        num_rows=num_rows,
        depth=depth,
        columns=operands.kernel.shape[2 if operands.scales is None else 1],
        dtype=rows.dtype.name,
        kernel_dtype=operands.kernel.dtype.name,
        out_dtype=out_dtype.name,
        scales=kernel.scales_kind if isinstance(kernel, QuantizedKernel) else None,
        group_size=kernel.group_size if isinstance(kernel, QuantizedKernel) else None,
        zero_points=operands.zero_points is not None,
        interleaved=isinstance(kernel, QuantizedKernel) and kernel.interleaved,
        rounded=isinstance(x, QuantizedRows),
        modes=modes_of(operands),
        **facts,
    )
    return call, operands


def product_operands(x: Any, kernel: Any, layer_index: Any) -> MatmulOperands:
    """Those of rows and weights, once they are checked."""
    if isinstance(kernel, QuantizedKernel):
        return _quantized_operands(x, kernel, layer_index)
    if isinstance(x, QuantizedRows):
        raise ValueError(_ROUNDED)
    check_are_arrays(x=x, kernel=kernel)
    same_dtype("x", x, "kernel", kernel)
    if x.dtype.name not in FLOATS:
        raise ValueError(f"`x` must be one of {', '.join(FLOATS)}. Got x.dtype={x.dtype}.")
    is_stacked = kernel.ndim == 3
    if x.ndim < 1 or kernel.ndim not in (2, 3) or is_stacked != (layer_index is not None):
        raise ValueError(
            "`kernel` must be [D, F], or [L, D, F] and `layer_index` given. "
            f"Got x.shape={x.shape}, kernel.shape={kernel.shape}, "
            f"layer_index={None if layer_index is None else 'given'}."
        )
    if x.shape[-1] != kernel.shape[-2]:
        raise ValueError(
            f"`x` must have a column for each row of `kernel`. Got x.shape={x.shape}, kernel.shape={kernel.shape}."
        )
    if layer_index is not None:
        check_layer_index(layer_index, kernel.shape[0])
    return MatmulOperands(
        x=jnp.asarray(x).reshape(-1, x.shape[-1]),
        kernel=jnp.asarray(kernel) if is_stacked else jnp.asarray(kernel)[None],
        layer_index=jnp.asarray(0 if layer_index is None else layer_index, jnp.int32),
    )


def product_bias(bias: Any, columns: int, operands: MatmulOperands, layer_index: Any) -> Float[Array, "L F"]:
    """A bias of a product's columns with an axis of layers, once it is checked."""
    check_are_arrays(bias=bias)
    check_float("bias", bias)
    layers = () if layer_index is None else (operands.kernel.shape[0],)
    if bias.shape != (*layers, columns):
        raise ValueError(f"`bias` must be {[*layers, columns]}, as `kernel` is. Got bias.shape={bias.shape}.")
    return jnp.asarray(bias).reshape(-1, columns)


def _quantized_operands(x: Any, kernel: QuantizedKernel, layer_index: Any) -> MatmulOperands:
    check_are_arrays(x=x)
    check_quantized(kernel)
    is_rounded = isinstance(x, QuantizedRows)
    if is_rounded and kernel.scales_kind != "channel":
        raise ValueError(_ROUNDED)
    values, scales, zero_points = jax.tree.map(jnp.asarray, (kernel.values, kernel.scales, kernel.zero_points))
    if (values.ndim == 3) != (layer_index is not None):
        raise ValueError(
            "`kernel` must have values [F, D], or [L, F, D] and `layer_index` given. "
            f"Got values.shape={values.shape}, layer_index={None if layer_index is None else 'given'}."
        )
    if x.dtype.name not in FLOATS or x.ndim < 1 or x.shape[-1] != values.shape[-1]:
        raise ValueError(
            f"`x` must be one of {', '.join(FLOATS)}, with a column for each of the kernel's inputs, the last axis of "
            f"its values. Got x.dtype={x.dtype}, x.shape={x.shape}, values.shape={values.shape}."
        )
    if layer_index is None:
        values, scales, zero_points = jax.tree.map(lambda leaf: leaf[None], (values, scales, zero_points))
    else:
        check_layer_index(layer_index, values.shape[0])
    if kernel.scales_kind == "channel":
        scales = jnp.broadcast_to(scales, (*values.shape[:2], 1))
    return MatmulOperands(
        x=x.values if is_rounded else jnp.asarray(x).reshape(-1, x.shape[-1]),
        row_scales=x.scales if is_rounded else None,
        kernel=values,
        scales=scales,
        zero_points=zero_points,
        layer_index=jnp.asarray(0 if layer_index is None else layer_index, jnp.int32),
    )
