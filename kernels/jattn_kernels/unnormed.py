"""Unnormed: rows whose norm is meant, and not taken yet; nor are they added up, perhaps."""

import dataclasses
import functools
import typing
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jattn_kernels.splits import Splits
from jattn_kernels.unmultiplied import Unmultiplied


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Unnormed:
    """What is read as the `rms_norm` of rows, by a product that takes the norm itself as it loads them.

    Attributes:
        rows: As they are.
        additions: What is added to them first, one after the other, each sum rounded to their dtype. Only
            `routed_experts_of_sum` and `mlp_of_sum` take some that are Unmultiplied.
        scale, layer_index, eps, offset: As of `rms_norm`; the last two are static.
    """

    rows: Float[Array, "T D"]
    scale: Float[Array, "*L D"]
    layer_index: Int[Array, ""] | int | None = None
    eps: float = dataclasses.field(metadata={"static": True})
    offset: float = dataclasses.field(default=0.0, metadata={"static": True})
    additions: tuple[Float[Array, "T D"] | Splits | Unmultiplied, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    @property
    def ndim(self) -> int:
        return self.rows.ndim

    @property
    def dtype(self) -> Any:
        return self.rows.dtype
