"""AttentionMetadata: what the kernels read about a batch, built once and reused by every layer."""

import dataclasses
import functools
import typing
from typing import Any

import jax
from jaxtyping import Array, Int


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """Lengths and places of a batch. Static fields are a bucket's bounds, never this batch's maxima.

    Attributes:
        seq_lens: Keys of each sequence, this pass's tokens included; 0 is padding.
        cu_q_lens: Where each sequence's queries begin.
        page_tables: One for each group of the pool.
        slots: For each group of the pool, where this pass's keys and values go.
        schedules: For each of the backend's layers the kernels' work list; None where they need none.
        max_seq_len_q, max_seq_len_k: Static bounds, in tokens.
    """

    seq_lens: Int[Array, " B"]
    cu_q_lens: Int[Array, " B+1"]
    page_tables: tuple[Int[Array, "B max_pages"], ...]
    slots: tuple[Int[Array, " T"], ...]
    schedules: tuple[Any, ...]
    max_seq_len_q: int = dataclasses.field(metadata={"static": True})
    max_seq_len_k: int = dataclasses.field(metadata={"static": True})
