"""Attention that is meant, and not computed yet: for a kernel that computes it itself, before what it does with it."""

import dataclasses
import functools
import typing
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jattn_kernels.call import Schedule
from jattn_kernels.spec import AttentionSpec


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Unattended:
    """What is read as the rows of `paged_decode` of one token a sequence, its heads side by side.

    Attributes:
        q: Of the tokens.
        Others: As of `paged_decode`; the last two are static.
    """

    q: Float[Array, "T N H"]
    k_pages: Float[Array, "L ..."]
    v_pages: Float[Array, "L ..."]
    page_table: Int[Array, "T max_pages"]
    seq_lens: Int[Array, " T"]
    layer_index: Int[Array, ""] | int
    schedule: Schedule | None = None
    spec: AttentionSpec = dataclasses.field(metadata={"static": True})
    implementation: str | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return (self.q.shape[0], self.spec.num_q_heads * self.spec.value_dim)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.q.dtype
