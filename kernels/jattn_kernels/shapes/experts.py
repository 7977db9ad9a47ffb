"""What the operands of a mixture of experts are checked for."""

import jax.numpy as jnp

from jattn_kernels.mxfp4 import GROUP
from jattn_kernels.quantized import INT4, MXFP4, NUMBERS_OF_BYTE, QuantizedKernel, check_quantized
from jattn_kernels.shapes.arrays import (
    FLOATS,
    check_are_arrays,
    check_axes,
    check_layer_index,
    same_dtype,
)
from jattn_kernels.shapes.routing import check_routing


def check_choice(x, weights, chosen) -> None:
    """Checks that weights and experts are those of x's tokens.

    Raises:
        ValueError: They are not.
    """
    check_are_arrays(x=x, weights=weights, chosen=chosen)
    if weights.dtype != jnp.float32 or weights.ndim != 2 or weights.shape[:1] != x.shape[:1] or 0 in weights.shape[1:]:
        raise ValueError(
            "`weights` must be float32 [T, k], some numbers for each row of x. "
            f"Got weights.dtype={weights.dtype}, weights.shape={weights.shape}, x.shape={x.shape}."
        )
    if chosen.dtype != jnp.int32 or chosen.shape != weights.shape:
        raise ValueError(
            f"`chosen` must be int32 {list(weights.shape)}, an expert for each weight. "
            f"Got chosen.dtype={chosen.dtype}, chosen.shape={chosen.shape}."
        )


def check_logits(x, logits, routing, choice_bias) -> None:
    """Checks that logits are those of x's tokens, and fit the router's facts.

    Raises:
        ValueError: They do not.
    """
    check_routing(logits, routing, choice_bias, bias_name="choice_bias")
    check_are_arrays(x=x)
    if logits.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"`logits` must have a row for each row of x. Got logits.shape={logits.shape}, x.shape={x.shape}."
        )


def check_experts(x, gate_up, down, biases, layer_index, routing=None) -> None:
    """Checks that shapes and dtypes fit each other.

    Args:
        biases: By name; None where there is none.

    Raises:
        ValueError: One does not.
    """
    given = {name: value for name, value in biases.items() if value is not None}
    check_are_arrays(x=x, gate_up=gate_up, down=down, **given)
    check_axes("x", x, ("T", "D"))
    if x.dtype.name not in FLOATS:
        raise ValueError(f"`x` must be one of {', '.join(FLOATS)}. Got x.dtype={x.dtype}.")
    layers = () if layer_index is None else ("L",)
    check_axes("gate_up", gate_up, (*layers, "E", "D", "2F"))
    check_axes("down", down, (*layers, "E", "F", "D"))
    *stack, units, hidden = down.shape
    if hidden != x.shape[1] or gate_up.shape != (*stack, hidden, 2 * units) or 0 in gate_up.shape:
        raise ValueError(
            f"`gate_up` and `down` must be [..., E, {x.shape[1]}, 2F] and [..., E, F, {x.shape[1]}]. "
            f"Got gate_up.shape={gate_up.shape}, down.shape={down.shape}."
        )
    if routing is not None and routing.all_experts != stack[-1]:
        raise ValueError(
            f"`routing` must be over the experts of `gate_up`, {stack[-1]}. Got num_experts={routing.num_experts}, "
            f"shared={routing.shared}."
        )
    if isinstance(gate_up, QuantizedKernel) or isinstance(down, QuantizedKernel):
        _check_quantized_experts(gate_up, down)
    else:
        same_dtype("x", x, "gate_up", gate_up)
        same_dtype("x", x, "down", down)
    columns = {"gate_up_bias": 2 * units, "down_bias": hidden}
    for name, bias in given.items():
        same_dtype("x", x, name, bias)
        if bias.shape != (*stack, columns[name]):
            raise ValueError(f"`{name}` must be {[*stack, columns[name]]}. Got {name}.shape={bias.shape}.")
    if layer_index is not None:
        check_layer_index(layer_index, gate_up.shape[0])


def _check_quantized_experts(gate_up, down) -> None:
    for name, kernel in {"gate_up": gate_up, "down": down}.items():
        if not isinstance(kernel, QuantizedKernel):
            raise ValueError(
                f"`gate_up` and `down` must both be quantised, or neither. Got {name}.dtype={kernel.dtype}."
            )
        if kernel.dtype == MXFP4:
            _check_mxfp4(name, kernel)
        else:
            check_quantized(kernel, name, ("L", "E"))
        if kernel.dtype == INT4:
            raise ValueError(
                f"`{name}` must be in fp8 with a scale for each output, expert or block, or in mxfp4. Got "
                f"values.dtype={kernel.dtype}."
            )
    if gate_up.scales_kind != down.scales_kind:
        raise ValueError(
            "`gate_up` and `down` must have scales of the same kind. Got one of each "
            f"{gate_up.scales_kind} and {down.scales_kind}."
        )


def _check_mxfp4(name, kernel) -> None:
    values, scales = kernel.values, kernel.scales
    check_are_arrays(values=values, scales=scales)
    *stack, outputs, width = values.shape
    groups = (*stack, width * NUMBERS_OF_BYTE // GROUP, outputs)
    fits = width * NUMBERS_OF_BYTE % GROUP == 0 and scales.shape == groups and scales.dtype == MXFP4
    if not fits or kernel.zero_points is not None:
        raise ValueError(
            f"`{name}` must have uint8 values [E, F, D / 2] and uint8 scales [E, D / {GROUP}, F], both perhaps after "
            f"L, and no zero points. Got values.shape={values.shape}, scales.dtype={scales.dtype}, "
            f"scales.shape={scales.shape}."
        )
