"""What the operands of a mixture of experts are checked for."""

import jax.numpy as jnp

from jattn_kernels.shapes.arrays import (
    FLOATS,
    check_are_arrays,
    check_axes,
    check_layer_index,
    same_dtype,
)


def check_experts(x, weights, chosen, gate_up, down, biases, layer_index) -> None:
    """Checks that shapes and dtypes fit each other.

    Args:
        biases: By name; None where there is none.

    Raises:
        ValueError: One does not.
    """
    given = {name: value for name, value in biases.items() if value is not None}
    check_are_arrays(x=x, weights=weights, chosen=chosen, gate_up=gate_up, down=down, **given)
    check_axes("x", x, ("T", "D"))
    if x.dtype.name not in FLOATS:
        raise ValueError(f"`x` must be one of {', '.join(FLOATS)}. Got x.dtype={x.dtype}.")
    if weights.dtype != jnp.float32 or weights.ndim != 2 or weights.shape[0] != x.shape[0] or 0 in weights.shape:
        raise ValueError(
            f"`weights` must be float32 [{x.shape[0]}, k], some numbers a token of x. "
            f"Got weights.dtype={weights.dtype}, weights.shape={weights.shape}."
        )
    if chosen.dtype != jnp.int32 or chosen.shape != weights.shape:
        raise ValueError(
            f"`chosen` must be int32 {list(weights.shape)}, an expert a weight. "
            f"Got chosen.dtype={chosen.dtype}, chosen.shape={chosen.shape}."
        )
    layers = () if layer_index is None else ("L",)
    check_axes("gate_up", gate_up, (*layers, "E", "D", "2F"))
    check_axes("down", down, (*layers, "E", "F", "D"))
    *stack, units, hidden = down.shape
    if hidden != x.shape[1] or gate_up.shape != (*stack, hidden, 2 * units) or 0 in gate_up.shape:
        raise ValueError(
            f"`gate_up` and `down` must be [..., E, {x.shape[1]}, 2F] and [..., E, F, {x.shape[1]}]. "
            f"Got gate_up.shape={gate_up.shape}, down.shape={down.shape}."
        )
    same_dtype("x", x, "gate_up", gate_up)
    same_dtype("x", x, "down", down)
    columns = {"gate_up_bias": 2 * units, "down_bias": hidden}
    for name, bias in given.items():
        same_dtype("x", x, name, bias)
        if bias.shape != (*stack, columns[name]):
            raise ValueError(f"`{name}` must be {[*stack, columns[name]]}. Got {name}.shape={bias.shape}.")
    if layer_index is not None:
        check_layer_index(layer_index, gate_up.shape[0])
