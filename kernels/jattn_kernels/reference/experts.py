"""The oracle's mixture of experts: one token at a time, one expert after the other."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from jattn_kernels.reference.quantized import dequantized

Activation = Callable[[np.ndarray, np.ndarray], np.ndarray]


def mixture_of_experts(
    x: Float[Any, "T D"],
    weights: Float[Any, "T k"],
    chosen: Int[Any, "T k"],
    gate_up: Shaped[Any, "*L E _ _"],
    down: Shaped[Any, "*L E _ _"],
    *,
    gate_up_bias: Float[Any, "*L E F2"] | None = None,
    down_bias: Float[Any, "*L E D"] | None = None,
    gate_up_scales: Shaped[Any, "*L E _ _"] | None = None,
    down_scales: Shaped[Any, "*L E _ _"] | None = None,
    activation: Activation | None = None,
    weighs_inputs: bool = False,
    layer_index: Int[Any, ""] | int | None = None,
) -> np.ndarray:
    """The float64 sum over a token's experts; a number outside 0 .. E - 1 is none of them.

    Args:
        gate_up, down: [*L, E, D, F2] and [*L, E, F, D]; outputs before inputs, where they have scales.
        activation: Of NumPy arrays, the gate's and the other half's; silu(gate) * up if None.
    """
    x, weights, chosen = np.asarray(x, np.float64), np.asarray(weights, np.float64), np.asarray(chosen)
    layers = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    layers |= {"gate_up_scales": gate_up_scales, "down_scales": down_scales}
    given = {name: np.asarray(array) for name, array in layers.items() if array is not None}
    which = ... if layer_index is None else int(layer_index)
    layer = {name: array[which] for name, array in given.items()}
    out = np.zeros(x.shape)
    for token, (row, factors, experts) in enumerate(zip(x, weights, chosen, strict=True)):
        for factor, expert in zip(factors, experts, strict=True):
            if 0 <= expert < len(layer["down"]):
                own = {name: array[expert] for name, array in layer.items()}
                out[token] += (
                    _expert(factor * row, own, activation)
                    if weighs_inputs
                    else (factor * _expert(row, own, activation))
                )
    return out


def _expert(row: np.ndarray, own: dict[str, np.ndarray], activation: Activation | None) -> np.ndarray:
    gate, up = np.split(_product(row, "gate_up", own), 2)
    return _product((activation or silu_gate)(gate, up), "down", own)


def _product(row: np.ndarray, name: str, own: dict[str, np.ndarray]) -> np.ndarray:
    scales, bias = own.get(f"{name}_scales"), own.get(f"{name}_bias", 0.0)
    kernel = own[name].astype(np.float64) if scales is None else dequantized(own[name], scales).T
    return row @ kernel + np.asarray(bias, np.float64)


def silu_gate(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up."""
    return gate / (1 + np.exp(-gate)) * up
