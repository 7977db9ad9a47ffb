"""Experts whose weights are held in few bits, as their checkpoint stores them: where a kernel multiplies them so."""

from typing import Any

import jax
import jax.numpy as jnp

from jattn.experts import are_multiplied_by_a_kernel
from jattn.matmul import FP8, MXFP4, MXFP4_GROUP, QuantizedKernel
from jattn_models.experts import GroupedLinear, MixtureOfExperts
from jattn_models.quantization import BlockScales, ChannelScales, Mxfp4, Quantization


def hold_experts(mixture: MixtureOfExperts, stored: Quantization) -> None:
    """Makes place for weights in few bits in place of a mixture's own; of shapes alone, as `nnx.eval_shape` gives them.

    Where no kernel takes such weights, or a device's share of them is no whole number of blocks, nothing changes: what
    they stand for is multiplied faster.
    """
    linears = mixture.gate_up_proj, mixture.down_proj
    held = [_held(linear, stored, parts=2 - number) for number, linear in enumerate(linears)]
    gate_up, down = held
    if gate_up is None or down is None:
        return
    if are_multiplied_by_a_kernel(gate_up, down, mixture.gate_up_proj.kernel.get_value().dtype):
        for linear, kernel in zip(linears, (gate_up, down), strict=True):
            linear.hold(kernel)


def _held(linear: GroupedLinear, stored: Quantization, *, parts: int) -> QuantizedKernel | None:
    """Shapes of a projection's weights, of which so many lie side by side; None where they do not come out even."""
    *stack, inputs, outputs = linear.kernel.get_value().shape
    match stored:
        case ChannelScales():
            return _kernel((FP8, *stack, outputs, inputs), (jnp.float32, *stack, outputs, 1))
        case BlockScales(rows, columns) if not (outputs // parts % rows or inputs % columns):
            scales = outputs // rows, inputs // columns
            return _kernel((FP8, *stack, outputs, inputs), (jnp.float32, *stack, *scales))
        case Mxfp4() if not inputs % MXFP4_GROUP:
            return _kernel((MXFP4, *stack, outputs, inputs // 2), (MXFP4, *stack, inputs // MXFP4_GROUP, outputs))
    return None


def _kernel(values: tuple[Any, ...], scales: tuple[Any, ...]) -> QuantizedKernel:
    of_values, of_scales = (jax.ShapeDtypeStruct(shape, dtype) for dtype, *shape in (values, scales))
    return QuantizedKernel(values=of_values, scales=of_scales)  # pyright: ignore[reportArgumentType]
