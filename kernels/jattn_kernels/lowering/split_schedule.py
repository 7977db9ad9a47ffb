"""The schedule of split-KV decode, computed in jit from the lengths: once a step, for all layers of one kind."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

_MOST_IDLE = 16  # one worker of so many may stay idle, and a share grow by what that leaves to the others


@typing.no_type_check
@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSchedule:
    """Parts of sequences, dealt out to workers that each have about the same number of tiles to do, for every head.

    Attributes:
        work_tiles: (sequence, first tile, end tile, splits of the sequence, end of its keys) of each split, in the
            order of the sequences. A sequence without keys has one empty split; unused work tiles come last.
        workers: (first work tile, end work tile) of each worker, and the fields of its first one: a block's first load
            brings all that its first copies wait for. All fields of a worker without work tiles are 0.
        split: (sequence, first work tile, end work tile) of those of more than one split; -1 where there are fewer.
        block_kv: Keys a tile; static.
        places: Of each work tile among those of sequences of more than one split, whose results are merged; `split`
            then counts those alone. None where results have as many places as there are work tiles.
    """

    work_tiles: Int[Array, "W 5"]
    workers: Int[Array, "workers 7"]
    split: Int[Array, "most_split 3"]
    block_kv: int = dataclasses.field(metadata={"static": True})
    places: Int[Array, " W"] | None = None

    @property
    def num_places(self) -> int:
        """Of results that are merged."""
        return self.work_tiles.shape[0] if self.places is None else 2 * self.workers.shape[0]

    def with_places(self) -> "DecodeSchedule":
        """The same, cut evenly, with places for no more than two parts a worker: a share cuts one sequence in two."""
        before = _offsets((self.work_tiles[:, 3] > 1).astype(jnp.int32))
        bounds = jnp.where(self.split[:, :1] < 0, -1, before[self.split[:, 1:]])
        split = jnp.concatenate([self.split[:, :1], bounds], axis=1)
        return dataclasses.replace(self, split=split, places=before[:-1])


def split(
    first_keys: Int[Array, " B"],
    end_keys: Int[Array, " B"],
    tiles_per_split: int | None,
    max_keys: int | None,
    *,
    block_kv: int,
    workers: int,
    at_once: int | None = None,
    least_share: int = 4,
) -> DecodeSchedule:
    """Cuts sequences evenly, or at multiples of `tiles_per_split`; then `max_keys` must be known.

    Args:
        at_once, least_share: As in `split_evenly`; without meaning where cuts are at multiples.
    """
    if tiles_per_split is None:
        facts = {"at_once": at_once, "least_share": least_share}
        return split_evenly(first_keys, end_keys, block_kv=block_kv, workers=workers, **facts)
    assert max_keys is not None
    cut = functools.partial(split_at_multiples, tiles_per_split=tiles_per_split, max_keys=max_keys)
    return cut(first_keys, end_keys, block_kv=block_kv, workers=workers)


def split_evenly(
    first_keys: Int[Array, " B"],
    end_keys: Int[Array, " B"],
    *,
    block_kv: int,
    workers: int,
    at_once: int | None = None,
    least_share: int = 4,
) -> DecodeSchedule:
    """Cuts the tiles of all sequences, one after the other, into equal shares, one a worker.

    A sequence is cut only where a share ends: there are at most B + workers - 1 splits. Where that spares half of the
    cuts or more, shares are up to a fifteenth larger and some workers idle, as it is for sequences of one length: 32 of
    them over 33 workers are not cut.

    Args:
        first_keys, end_keys: The keys that a sequence's queries see, by their numbers.
        block_kv: Keys a tile.
        workers: How many shares there are at most.
        at_once: How many are worked on at the same time, where that is fewer: they are all at work before shares are
            cut to less than `least_share`.
        least_share: Tiles.
    """
    batch_size = first_keys.shape[0]
    first_tile, end_tile = _tiles(first_keys, end_keys, block_kv)
    tiles = end_tile - first_tile
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    begins = ends - tiles
    share = _share(begins, ends, workers)
    if at_once is not None:
        share = jnp.maximum(share, jnp.minimum(-(-ends[-1] // at_once), least_share))
    first_worker = jnp.minimum(begins // share, workers - 1)
    counts = jnp.where(tiles > 0, (ends - 1) // share - first_worker + 1, 1)
    offsets = _offsets(counts)

    work_tile, used, sequence = _splits(offsets, batch_size + workers - 1)
    worker = first_worker[sequence] + work_tile - offsets[sequence]
    first = jnp.maximum(begins[sequence], worker * share)
    end = jnp.where(used, jnp.maximum(first, jnp.minimum(ends[sequence], (worker + 1) * share)), first)
    shift = first_tile[sequence] - begins[sequence]
    fields = (sequence, first + shift, end + shift, counts[sequence], end_keys[sequence])
    return DecodeSchedule(
        work_tiles=jnp.stack(fields, axis=1),
        workers=_workers(fields, jnp.where(used, worker, workers), workers),
        split=_split_sequences(offsets, min(batch_size, workers)),
        block_kv=block_kv,
    )


def split_at_multiples(
    first_keys: Int[Array, " B"],
    end_keys: Int[Array, " B"],
    *,
    block_kv: int,
    tiles_per_split: int,
    max_keys: int,
    workers: int,
) -> DecodeSchedule:
    """Cuts every sequence at the same multiples of a number of tiles, whatever else is in the batch.

    Args:
        tiles_per_split: That number.
        max_keys: No sequence is longer.
        Others: As in `split_evenly`.
    """
    batch_size = first_keys.shape[0]
    first_tile, end_tile = _tiles(first_keys, end_keys, block_kv)
    first_split = first_tile // tiles_per_split
    counts = jnp.maximum(1, -(-end_tile // tiles_per_split) - first_split)
    offsets = _offsets(counts)

    work_tile, used, sequence = _splits(offsets, batch_size * max(1, -(-max_keys // (tiles_per_split * block_kv))))
    split = first_split[sequence] + work_tile - offsets[sequence]
    first = jnp.maximum(first_tile[sequence], split * tiles_per_split)
    end = jnp.minimum(end_tile[sequence], (split + 1) * tiles_per_split)
    end = jnp.where(used, jnp.maximum(first, end), first)
    done = jnp.cumsum(end - first, dtype=jnp.int32)
    share = jnp.maximum(1, -(-done[-1] // workers))
    worker = jnp.minimum((done - (end - first)) // share, workers - 1)
    fields = (sequence, first, end, counts[sequence], end_keys[sequence])
    return DecodeSchedule(
        work_tiles=jnp.stack(fields, axis=1),
        workers=_workers(fields, jnp.where(used, worker, workers), workers),
        split=_split_sequences(offsets, batch_size),
        block_kv=block_kv,
    )


def whole(first_keys: Int[Array, " B"], end_keys: Int[Array, " B"], *, block_kv: int, workers: int) -> DecodeSchedule:
    """Cuts no sequence; arguments as in `split_evenly`."""
    keys = jnp.iinfo(jnp.int32).max // 2
    cut = functools.partial(split_at_multiples, tiles_per_split=keys // block_kv, max_keys=1)
    schedule = cut(first_keys, end_keys, block_kv=block_kv, workers=workers)
    return dataclasses.replace(schedule, split=schedule.split[:0])


def _share(begins: Int[Array, " B"], ends: Int[Array, " B"], workers: int) -> Int[Array, ""]:
    """Tiles of a worker.

    A cut costs a call up to 0.2 us on an H200 (two work tiles for one, and a merge), idle workers less than their share
    of it, since the memory is what is waited for. But where a worker has few tiles, one tile more is much.
    """
    idle = workers // _MOST_IDLE if begins.shape[0] > 1 else 0
    shares = jnp.maximum(1, -(-ends[-1] // (workers - jnp.arange(idle + 1, dtype=jnp.int32))))
    cuts = (ends - 1)[None] // shares[:, None] - begins[None] // shares[:, None]
    cuts = jnp.sum(jnp.maximum(0, cuts), axis=1, dtype=jnp.int32)
    fitting = (2 * cuts <= cuts[0]) & ((_MOST_IDLE - 1) * shares <= _MOST_IDLE * shares[0])
    return shares[jnp.argmax(fitting)]  # the first of all if none spares so many


def _tiles(
    first_keys: Int[Array, " B"], end_keys: Int[Array, " B"], block_kv: int
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """The tiles that hold a range of keys; none if it is empty."""
    first = first_keys // block_kv
    return first, jnp.where(first_keys < end_keys, -(-end_keys // block_kv), first)


def _offsets(counts: Int[Array, " B"]) -> Int[Array, " B_plus_1"]:
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])


def _splits(offsets: Int[Array, " B_plus_1"], most: int):
    """The numbers of all work tiles, whether each is used, and its sequence."""
    work_tile = jnp.arange(most, dtype=jnp.int32)
    return work_tile, work_tile < offsets[-1], jnp.minimum(_owner(offsets[1:], work_tile), offsets.shape[0] - 2)


def _workers(fields: tuple[Int[Array, " W"], ...], worker: Int[Array, " W"], workers: int) -> Int[Array, "workers 7"]:
    """Each worker's work tiles, and the fields of the first one.

    All as sums over the work tiles, so that they are one kernel, where a search and a gather after it would be two.

    Args:
        worker: Of each work tile, rising; `workers` where it is unused.
    """
    number, worker = jnp.arange(workers, dtype=jnp.int32)[:, None], worker[None]
    before = jnp.concatenate([jnp.full((1, 1), -1, jnp.int32), worker[:, :-1]], axis=1)
    bounds = [(worker < number).astype(jnp.int32), (worker <= number).astype(jnp.int32)]
    of_first = [jnp.where((worker == number) & (worker != before), field[None], 0) for field in fields]
    return jnp.sum(jnp.stack([*bounds, *of_first], axis=1), axis=2, dtype=jnp.int32)


def _split_sequences(offsets: Int[Array, " B_plus_1"], most: int) -> Int[Array, "most 3"]:
    """Those of more than one work tile, each with its work tiles' bounds."""
    first, end = offsets[:-1], offsets[1:]
    # A sequence's place among the split ones is how many of them come before it.
    is_split = end - first > 1
    place = jnp.where(is_split, jnp.cumsum(is_split, dtype=jnp.int32) - 1, most)
    rows = jnp.stack([jnp.arange(first.shape[0], dtype=jnp.int32), first, end], axis=1)
    return jnp.full((most, 3), -1, jnp.int32).at[place].set(rows, mode="drop")


def _owner(ends: Int[Array, " n"], at: Int[Array, " m"]) -> Int[Array, " m"]:
    """How many of the rising `ends` are not above each number; one kernel, where a search would be a loop of them."""
    return jnp.sum(ends[None, :] <= at[:, None], axis=1, dtype=jnp.int32)
