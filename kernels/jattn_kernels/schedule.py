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
    """Parts of sequences, dealt out to workers that each have the same number of tiles to do, for every head.

    Attributes:
        items: (sequence, first tile, end tile, parts of the sequence) of each part, in the order of the sequences. A
            sequence without keys has one empty part; unused items come last.
        starts: Where each worker's items begin, and where the last one's end.
        offsets: Where each sequence's items begin, and where the last one's end.
        split: The sequences of more than one part; -1 where there are fewer.
        block_kv: Keys a tile; static.
    """

    items: Int[Array, "W 4"]
    starts: Int[Array, " workers_plus_1"]
    offsets: Int[Array, " B_plus_1"]
    split: Int[Array, " most_split"]
    block_kv: int = dataclasses.field(metadata={"static": True})


def split_evenly(seq_lens: Int[Array, " B"], *, block_kv: int, workers: int) -> DecodeSchedule:
    """Cuts the tiles of all sequences, one after the other, into as many equal shares as there are workers.

    A sequence is cut only where a share ends, so there are at most B + workers - 1 parts.
    """
    batch_size = seq_lens.shape[0]
    tiles = -(-seq_lens // block_kv)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    begins = ends - tiles
    share = jnp.maximum(1, -(-ends[-1] // workers))
    first_worker = jnp.minimum(begins // share, workers - 1)
    counts = jnp.where(tiles > 0, (ends - 1) // share - first_worker + 1, 1)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])

    item = jnp.arange(batch_size + workers - 1, dtype=jnp.int32)
    used = item < offsets[-1]
    sequence = jnp.minimum(_owner(offsets[1:], item), batch_size - 1)
    worker = first_worker[sequence] + item - offsets[sequence]
    first = jnp.maximum(begins[sequence], worker * share) - begins[sequence]
    end = jnp.minimum(ends[sequence], (worker + 1) * share) - begins[sequence]
    end = jnp.where(used, jnp.maximum(first, end), first)
    worker = jnp.where(used, worker, workers)

    most_split = min(batch_size, workers)
    # A sequence's place among the split ones is how many of them come before it.
    is_split = counts > 1
    place = jnp.where(is_split, jnp.cumsum(is_split, dtype=jnp.int32) - 1, most_split)
    split = jnp.full(most_split, -1, jnp.int32).at[place].set(jnp.arange(batch_size, dtype=jnp.int32), mode="drop")
    return DecodeSchedule(
        items=jnp.stack([sequence, first, end, counts[sequence]], axis=1),
        starts=_owner(worker, jnp.arange(workers + 1, dtype=jnp.int32) - 1),
        offsets=offsets,
        split=split,
        block_kv=block_kv,
    )


def _owner(ends: Int[Array, " n"], at: Int[Array, " m"]) -> Int[Array, " m"]:
    """How many of the rising `ends` are not above each number; one kernel, where a search would be a loop of them."""
    return jnp.sum(ends[None, :] <= at[:, None], axis=1, dtype=jnp.int32)
