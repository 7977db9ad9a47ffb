"""Gated MLPs of rows that are added up and normed first, with the products before and after them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn_kernels.call import MatmulCall, MlpCall, modes_of
from jattn_kernels.dispatch import choose, serves
from jattn_kernels.matmul import matmul_gated_of_sum, matmul_splits, multiplied
from jattn_kernels.mlp_operands import MlpOperands
from jattn_kernels.norm import check_additions, packed_norm
from jattn_kernels.operands import MatmulOperands
from jattn_kernels.packed_product import packed_product, product_bias
from jattn_kernels.quantized import QuantizedKernel
from jattn_kernels.splits import Splits
from jattn_kernels.unattended import Unattended
from jattn_kernels.unattended_latents import UnattendedLatents
from jattn_kernels.unmultiplied import NextProduct, Unmultiplied
from jattn_kernels.unnormed import Unnormed

Weights = Float[Array, "*L D F"] | QuantizedKernel
Activation = Callable[[jax.Array, jax.Array], jax.Array]


def mlp_of_sum(
    x: Unnormed,
    gate_up: Weights,
    down: Weights,
    activation: Activation,
    *,
    following: NextProduct | None = None,
    layer_index: Int[Array, ""] | int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T D"] | Splits, Float[Array, "T D"], Splits | None]:
    """down(activation(gate, up)) of rows that are added up and normed first; the rows' sum; and a product after it.

    On Hopper all of it is one kernel for one token and weights in int4, the product too that is added last, if it is
    not taken yet, and the one that the next layer begins with: it is the last of what is returned, None where it is
    still to do.

    Args:
        x: Its `additions` may be Unmultiplied. The kernel takes them if they are two, splits with room
            (`rows_of_room`) and a product.
        gate_up, down: As of `matmul`.
        activation: Of the gate's columns, the first half, and the others; elementwise, hashable, and such that Pallas
            lowers it for a GPU, as silu and the approximate gelu.
        following: The next layer's product.
        layer_index: Of the MLP's weights, as of `matmul`.
        implementation: Which one to use; None takes the kernel where it serves the call.

    Raises:
        ValueError, NotImplementedError: As `matmul_splits_of_sum`.
    """
    for wanted in [None] if following is None else [following, None]:
        packed = _packed(x, gate_up, down, activation, wanted, layer_index)
        if packed is not None and serves(packed[0], implementation):
            return choose(packed[0], implementation).implementation.run(*packed)
    additions = tuple(multiplied(addition, implementation=implementation) for addition in x.additions)
    given = dataclasses.replace(x, additions=additions)
    options: dict[str, Any] = {"layer_index": layer_index, "implementation": implementation}
    hidden, total, _ = matmul_gated_of_sum(given, gate_up, activation, **options)
    return matmul_splits(hidden, down, **options), total, None


def is_one_kernel(
    x: Unnormed,
    gate_up: Weights,
    down: Weights,
    activation: Activation,
    *,
    layer_index: Int[Array, ""] | int | None = None,
) -> bool:
    """Whether `mlp_of_sum` of these is one kernel."""
    packed = _packed(x, gate_up, down, activation, None, layer_index)
    return packed is not None and serves(packed[0])


def _packed(
    x: Unnormed, gate_up: Any, down: Any, activation: Activation, following: NextProduct | None, layer_index: Any
) -> tuple[MlpCall, MlpOperands] | None:
    """The call of all of it in one, and its operands; None if what is added is nothing that could be."""
    last = x.additions[-1] if x.additions else None
    if len(x.additions) != 2 or not isinstance(x.additions[0], Splits) or not isinstance(last, Unmultiplied):
        return None
    if isinstance(last.rows, Unattended | UnattendedLatents):
        return None
    check_additions(x, products=True)
    kernels = [last.kernel, gate_up, down, *([] if following is None else [following.kernel])]
    norm_call, norm = packed_norm(x.rows, x.scale, x.eps, x.offset, x.layer_index, x.additions[:1])
    output_call, output = _product(last.rows, last.kernel, last.layer_index, last.bias)
    first_call, first = _product(x.rows, gate_up, layer_index, None)
    hidden = jnp.zeros((*x.shape[:-1], first_call.columns // 2), x.dtype)  # for its shape
    down_call, second = _product(hidden, down, layer_index, None)
    left, dtypes = x.additions[0].parts, {_scales_dtype(kernel) for kernel in kernels}
    if left.dtype != jnp.float32:  # nobody could leave anything there
        return None
    call = MlpCall(
        norm=norm_call,
        left=(left.shape[0], left.shape[1]),
        output=output_call,
        gate_up=dataclasses.replace(first_call, gate=activation),
        down=down_call,
        scales_dtype=dtypes.pop() if len(dtypes) == 1 else None,
    )
    operands = MlpOperands(norm=norm, output=output, gate_up=first, down=second)
    if following is None:
        return dataclasses.replace(call, modes=modes_of(operands)), operands
    next_norm, _ = packed_norm(x.rows, following.scale, following.eps, following.offset, following.scale_layer)
    next_call, product = _product(x.rows, following.kernel, following.layer_index, following.bias)
    scale = {"next_scale": following.scale, "next_scale_layer": jnp.asarray(following.scale_layer, jnp.int32)}
    operands = dataclasses.replace(operands, next=product, **scale)
    return dataclasses.replace(call, next=next_call, next_norm=next_norm, modes=modes_of(operands)), operands


def _product(rows: Any, kernel: Any, layer_index: Any, bias: Any) -> tuple[MatmulCall, MatmulOperands]:
    call, operands = packed_product(rows, kernel, layer_index, None, None, in_splits=True)
    if bias is None:
        return call, operands
    added = product_bias(bias, call.columns, operands, layer_index)
    return dataclasses.replace(call, biased=True), dataclasses.replace(operands, bias=added)


def _scales_dtype(kernel: Any) -> str | None:
    return kernel.scales.dtype.name if isinstance(kernel, QuantizedKernel) else None
