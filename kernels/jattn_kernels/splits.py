"""Splits: rows of a product that nobody has added up yet."""

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
    """What adds up to the rows of a product: for a kernel that reads them next and adds them up as it does.

    Attributes:
        parts: Each of a share of the product's depth, float32, or rounded to `dtype`; always added in this order, in
            float32. Rows past `num_rows` are 0.
        num_rows: Of the product; static.
        dtype: That the sum is rounded to; static.
    """

    parts: Float[Array, "S R *columns"]
    num_rows: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the sum."""
        return (self.num_rows, *self.parts.shape[2:])

    @property
    def ndim(self) -> int:
        return self.parts.ndim - 1

    def reshape(self, num_rows: int, *columns: int) -> "Splits":
        """With other columns; the rows stay."""
        assert num_rows == self.num_rows
        return dataclasses.replace(self, parts=self.parts.reshape(*self.parts.shape[:2], *columns))


def added(x: Float[Array, "..."] | Splits) -> Float[Array, "..."]:
    """The rows themselves."""
    return x.parts.sum(axis=0, dtype=jnp.float32)[: x.num_rows].astype(x.dtype) if isinstance(x, Splits) else x


def in_shape_of(x: Float[Array, "..."] | Splits, other: Splits) -> Splits:
    """The same rows in as many parts as other splits have."""
    rows = x.parts[:, : x.num_rows].sum(axis=0, dtype=jnp.float32) if isinstance(x, Splits) else x
    whole = jnp.zeros(other.parts.shape, other.parts.dtype)
    return dataclasses.replace(other, parts=whole.at[0, : other.num_rows].set(rows.astype(whole.dtype)))
