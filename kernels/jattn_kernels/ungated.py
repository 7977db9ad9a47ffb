"""Ungated: what an activation makes half as many numbers of, and has not yet."""

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn_kernels.splits import Splits, added


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ungated:
    """What is read as activation(gate, up), by a product that takes the activation itself as it rounds its rows.

    Attributes:
        rows: A row's gate, then as many numbers of the other half.
        activation: Elementwise and hashable; static.
    """

    rows: Float[Array, "T 2*F"] | Splits
    activation: Callable[[Array, Array], Array] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what the activation makes of them."""
        return (*self.rows.shape[:-1], self.rows.shape[-1] // 2)

    @property
    def ndim(self) -> int:
        return self.rows.ndim

    @property
    def dtype(self) -> Any:
        return self.rows.dtype


def gated(x: Float[Array, "..."] | Ungated) -> Float[Array, "..."]:
    """The rows as they are read."""
    if not isinstance(x, Ungated):
        return x
    gate, up = jnp.split(added(x.rows), 2, axis=-1)
    return x.activation(gate, up)
