"""Products that are meant, and not taken yet: of rows that are there, and of those that a layer will leave."""

import dataclasses
import functools
import typing
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jattn_kernels.quantized import QuantizedKernel
from jattn_kernels.unattended import Unattended
from jattn_kernels.unattended_latents import UnattendedLatents


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Unmultiplied:
    """What is read as rows @ kernel + bias, by a kernel that takes the product itself, before what it does with it.

    Attributes:
        rows: As they are; for `routed_experts_of_sum` alone also what they are made of.
        kernel, layer_index: As of `matmul`.
        bias: As of `matmul_splits`.
    """

    rows: Float[Array, "T D"] | Unattended | UnattendedLatents
    kernel: Float[Array, "*L D F"] | QuantizedKernel
    layer_index: Int[Array, ""] | int | None = None
    bias: Float[Array, "*L F"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the product."""
        return (*self.rows.shape[:-1], self.kernel.shape[-1])

    @property
    def ndim(self) -> int:
        return self.rows.ndim

    @property
    def dtype(self) -> Any:
        return self.rows.dtype


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class NextProduct:
    """The product that the next layer begins with, of the norm of what this one leaves.

    Attributes:
        scale, scale_layer, eps, offset: As of `rms_norm`; the last two are static.
        kernel, layer_index: As of `matmul`.
        bias: As of `matmul_splits`.
    """

    scale: Float[Array, "L D"]
    scale_layer: Int[Array, ""] | int
    kernel: Float[Array, "L D F"] | QuantizedKernel
    layer_index: Int[Array, ""] | int
    bias: Float[Array, "L F"] | None = None
    eps: float = dataclasses.field(metadata={"static": True})
    offset: float = dataclasses.field(default=0.0, metadata={"static": True})
