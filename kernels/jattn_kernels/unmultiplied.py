"""Unmultiplied: rows whose product with weights is meant, and not taken yet."""

import dataclasses
import functools
import typing
from typing import Any

import jax
from jaxtyping import Array, Float, Int


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Unmultiplied:
    """What is read as rows @ kernel, by a kernel that takes the product itself, before what it does with it.

    Attributes:
        rows: As they are.
        kernel, layer_index: As of `matmul`.
    """

    rows: Float[Array, "T D"]
    kernel: Float[Array, "*L D F"]
    layer_index: Int[Array, ""] | int | None = None

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
