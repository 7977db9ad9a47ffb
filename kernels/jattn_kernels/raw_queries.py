"""RawQueries: queries of latent attention as their projection gives them, and what makes them what decode reads."""

import dataclasses
import functools
import typing
from typing import Any

import jax
from jaxtyping import Array, Float, Float32, Int

from jattn_kernels.rotation import rotated
from jattn_kernels.shapes.arrays import check_are_arrays, check_axes, check_layer_index, same_dtype
from jattn_kernels.splits import Splits, added


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class RawQueries:
    """Heads of [numbers that do not turn, numbers that do], of which the first are to take up the keys' projection.

    Attributes:
        rows: A token's heads one after the other, perhaps before other numbers; or what adds up to them.
        k_up: The keys' projection of each head.
        layer_index: Which of its layers, if it has some; may be traced.
        rope_dim: Numbers of a head that turn; static.
    """

    rows: Float[Array, "T _"] | Splits
    k_up: Float[Array, "*L N D C"]
    layer_index: Int[Array, ""] | int | None = None
    rope_dim: int = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        """Of the rows."""
        return self.rows.dtype

    @property
    def num_heads(self) -> int:
        return self.k_up.shape[-3]

    @property
    def nope_dim(self) -> int:
        """Numbers of a head that do not turn."""
        return self.k_up.shape[-2]

    def heads(
        self, cos: Float32[Array, "T half"], sin: Float32[Array, "T half"]
    ) -> tuple[Float[Array, "T N D"], Float[Array, "T N R"]]:
        """What does not turn, not absorbed, and what does, turned."""
        width = self.nope_dim + self.rope_dim
        heads = added(self.rows)[:, : self.num_heads * width].reshape(-1, self.num_heads, width)
        return heads[..., : self.nope_dim], rotated(heads[..., self.nope_dim :], cos, sin)


def check_raw_queries(queries: RawQueries, num_tokens: int, compressed: int) -> None:
    """Checks queries that are to be absorbed.

    Args:
        compressed: Numbers of a latent row's compressed part.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    rows, k_up = queries.rows, queries.k_up
    check_are_arrays(k_up=k_up)
    has_layers = queries.layer_index is not None
    check_axes("k_up", k_up, ("L", "N", "D", "C") if has_layers else ("N", "D", "C"))
    if has_layers:
        check_layer_index(queries.layer_index, k_up.shape[0])
    check_axes("rows", rows, ("T", "W"))
    same_dtype("rows", rows, "k_up", k_up)
    needed = queries.num_heads * (queries.nope_dim + queries.rope_dim)
    if rows.shape[0] != num_tokens or rows.shape[1] < needed or k_up.shape[-1] != compressed:
        raise ValueError(
            f"Queries must have {num_tokens} rows of at least {needed} numbers, and `k_up` {compressed} numbers for "
            f"each of a head's. Got rows.shape={rows.shape}, k_up.shape={k_up.shape}."
        )
