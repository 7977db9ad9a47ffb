"""Split-KV work lists, computed in jit from the lengths: once a step, for all layers of one kind."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSchedule:
    """Parts of sequences, each the work of one block of a kernel for every head.

    Attributes:
        items: (sequence, first tile, end tile) of each part, in the order of the sequences; unused ones are empty.
        offsets: Where each sequence's parts begin among the items. A sequence without keys has none.
        block_kv: Keys a tile; static.
    """

    items: Int[Array, "W 3"]
    offsets: Int[Array, " B_plus_1"]
    block_kv: int = dataclasses.field(metadata={"static": True})


def split_evenly(seq_lens: Int[Array, " B"], *, block_kv: int, parts: int) -> DecodeSchedule:
    """Cuts sequences into parts of nearly equal size, about `parts` in all; at most B + parts.

    A batch of more sequences than `parts` is cut only where one sequence is longer than its share of all the work.
    """
    batch_size = seq_lens.shape[0]
    tiles = -(-seq_lens // block_kv)
    share = jnp.maximum(1, -(-jnp.sum(tiles) // parts))
    counts = -(-tiles // share)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    item = jnp.arange(batch_size + parts, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(offsets[1:], item, side="right"), batch_size - 1).astype(jnp.int32)
    size = -(-tiles // jnp.maximum(counts, 1))[sequence]
    first = jnp.minimum((item - offsets[sequence]) * size, tiles[sequence])
    end = jnp.minimum(first + size, tiles[sequence])
    return DecodeSchedule(items=jnp.stack([sequence, first, end], axis=1), offsets=offsets, block_kv=block_kv)
