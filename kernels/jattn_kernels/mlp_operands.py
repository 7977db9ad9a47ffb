"""The arrays of an MLP of rows that are added up and normed first, and of the products around it."""

import dataclasses
import functools
import typing
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jattn_kernels.operands import MatmulOperands, NormOperands

_ABSENT: Any = None
MOST_SPLITS = 4  # of the depth of a product, so many at most


def rows_of_room(width: int, units: int) -> int:
    """Rows that splits before an MLP in one kernel have: one that is added, and room for what blocks leave each other.

    That is splits of two products, and hidden units, of which two take the room of a number.

    Args:
        width: Of the token.
        units: Hidden ones of the MLP.
    """
    return 1 + 2 * MOST_SPLITS + -(-units // (2 * width))


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpOperands:
    """All of them.

    Attributes:
        norm: Of the rows; `norm.additions` are those that come first.
        output: Rows and weights of the product that is added last.
        gate_up, down: The MLP's weights; what they have for rows is nothing but a shape, as of `next`.
        next: Of the next layer's first product, or None.
        next_scale, next_scale_layer: Of the norm of its rows.
    """

    norm: NormOperands
    output: MatmulOperands
    gate_up: MatmulOperands
    down: MatmulOperands
    next: MatmulOperands | None = None
    next_scale: Float[Array, "L D"] | None = None
    next_scale_layer: Int[Array, ""] = _ABSENT
