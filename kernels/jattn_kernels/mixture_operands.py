"""The arrays of a mixture of experts, and of what it may begin and end with."""

import dataclasses
import functools
import typing
from typing import Any

import jax
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

from jattn_kernels.operands import LatentTokenOperands, NormOperands, TokenOperands
from jattn_kernels.splits import Splits

_ABSENT: Any = None  # what an operation does not have; which it has is known by its name


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class NextOperands:
    """What a product that follows a mixture is made of.

    Attributes:
        scale, scale_layer: Of the norm of its rows.
        kernel, layer: Its weights.
        bias: Of its columns.
    """

    scale: Float[Array, "L D"]
    scale_layer: Int[Array, ""]
    kernel: Float[Array, "L D F"]
    layer: Int[Array, ""]
    bias: Float[Array, "L F"] | None = None


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterOperands:
    """What a mixture's logits are made of, and its rows: the norm of a sum.

    Attributes:
        norm: Of it; `norm.additions` are those that come first.
        attended, output, output_layer: Rows and weights, of all layers, of the product that is added last.
        output_bias: Of that product's columns.
        attention: What its rows are made of where they are not made.
        kernel: The router's, of all layers; the experts' layer is meant.
        bias: Of the logits, likewise.
        next: Of what follows the mixture.
    """

    norm: NormOperands
    attended: Float[Array, "T A"] | None
    attention: TokenOperands | LatentTokenOperands | None = None
    output: Float[Array, "L A D"]
    output_layer: Int[Array, ""]
    output_bias: Float[Array, "L D"] | None = None
    kernel: Float[Array, "L D E"]
    bias: Float[Array, "L E"] | None = None
    next: NextOperands | None = None


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsOperands:
    """All arrays of a mixture of experts; `layer_index` names the layer of the experts' arrays.

    Attributes:
        weights, chosen: Of each token's experts; None where the logits are given.
        logits: The router's; None where the choice is made.
        router: What they are made of, where they are not made; x is then `router.norm.x`.
        choice_bias: Of the choice by logits.
        gate_up, down: The values of a QuantizedKernel, outputs before inputs, where there are scales.
        gate_up_scales, down_scales: Its scales; one for each output, if not for each block or group of inputs.
    """

    x: Float[Array, "T D"]
    weights: Float32[Array, "T k"] = _ABSENT
    chosen: Int32[Array, "T k"] = _ABSENT
    logits: Float[Array, "T E"] | Splits = _ABSENT
    router: RouterOperands | None = None
    choice_bias: Float[Array, " E"] | None = None
    gate_up: Shaped[Array, "L E _ _"]
    down: Shaped[Array, "L E _ _"]
    layer_index: Int[Array, ""]
    gate_up_bias: Float[Array, "L E F2"] | None = None
    down_bias: Float[Array, "L E D"] | None = None
    gate_up_scales: Shaped[Array, "L E _ _"] | None = None
    down_scales: Shaped[Array, "L E _ _"] | None = None
