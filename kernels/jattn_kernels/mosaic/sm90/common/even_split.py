"""The schedule of split-KV decode as one small kernel: what `lowering.split_schedule` is in a dozen kernels of XLA.

one block of one warpgroup; a thread has a sequence, then a work tile, a worker, a place of a split sequence
  sums        of tiles and of work tiles up to each sequence: each round adds the sums of twice as many before
  the share   by sums over the warpgroup, for each number of workers that may idle
  searches    of a work tile's sequence and of a worker's first one, by halves, in shared memory

All of it is integer arithmetic, and the same to the bit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jattn_kernels.lowering.key_bounds import KeyBounds, is_narrow, seen_by_some
from jattn_kernels.lowering.split_schedule import MOST_IDLE, DecodeSchedule, split
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.indexed import gather, scatter
from jattn_kernels.spec import AttentionSpec

_THREADS = 128
_MOST_SEQUENCES = 512  # for which there are registers
_SPLIT = 2**16  # what a split sequence counts where work tiles and split sequences are in one number
_ONE_EACH = plgpu.Layout.WG_STRIDED((_THREADS,), vec_size=1)
_FIELDS, _OF_WORKER, _OF_SPLIT = 5, 7, 3


def split_seen(
    bounds: KeyBounds, spec: AttentionSpec, tiles_per_split: int | None, max_keys: int | None, **facts: Any
) -> DecodeSchedule:
    """The schedule of the keys that some token of each sequence sees: cut as `split_schedule.split` does.

    Args:
        bounds: Of each sequence's tokens.
        facts: `block_kv`, `workers`, and perhaps `at_once` and `least_share`.
    """
    first_keys, end_keys = seen_by_some(bounds)
    by_kernel = tiles_per_split is None and fits(end_keys.shape[0], facts["workers"])
    if not by_kernel or tiles.interpret_params() is not None:  # which takes seconds to compile it
        return split(first_keys, end_keys, tiles_per_split, max_keys, **facts)
    return split_evenly(first_keys if is_narrow(spec) else None, end_keys, **facts)


def fits(batch_size: int, workers: int) -> bool:
    """Whether one block can cut so many sequences."""
    return batch_size <= _MOST_SEQUENCES and batch_size + workers <= _SPLIT


def split_evenly(
    first_keys: Int[Array, " B"] | None,
    end_keys: Int[Array, " B"],
    *,
    block_kv: int,
    workers: int,
    at_once: int | None = None,
    least_share: int = 4,
) -> DecodeSchedule:
    """What `split_schedule.split_evenly` gives.

    Args:
        first_keys: None where all are 0.
    """
    batch_size = end_keys.shape[0]
    sizes = batch_size + workers - 1, workers, min(batch_size, workers)
    shapes = list(zip(sizes, (_FIELDS, _OF_WORKER, _OF_SPLIT), strict=True))
    body = _Body(batch_size, block_kv, workers, at_once, least_share)
    run = launch.kernel(
        body.block,
        out_type=[jax.ShapeDtypeStruct((size * width,), jnp.int32) for size, width in shapes],
        grid=(1,),
        grid_names=("block",),
        kernel_name="split_evenly",
    )
    outs = run(end_keys) if first_keys is None else run(end_keys, first_keys)
    work_tiles, of_workers, of_split = (out.reshape(shape) for out, shape in zip(outs, shapes, strict=True))
    return DecodeSchedule(work_tiles=work_tiles, workers=of_workers, split=of_split, block_kv=block_kv)


class _Sequences(NamedTuple):
    """In shared memory, of each sequence; (P,)."""

    begins: Any  # tiles of those before
    ends: Any
    shift: Any  # from a tile's number among all to its number in the sequence
    end_keys: Any
    first_worker: Any
    last_worker: Any
    work_begins: Any
    work_ends: Any
    num_split: Any  # split ones up to it
    sums: Any  # (2, P)


@dataclasses.dataclass(frozen=True)
class _Body:
    num_seqs: int
    block_kv: int
    workers: int
    at_once: int | None
    least_share: int

    def block(self, end_keys: Any, *refs: Any) -> None:
        first_keys = refs[0] if len(refs) > 3 else None
        padded = pl.cdiv(self.num_seqs, _THREADS) * _THREADS
        shapes = [(padded,)] * (len(_Sequences._fields) - 1) + [(2, padded)]
        scratch = _Sequences(*(plgpu.SMEM(shape, jnp.int32) for shape in shapes))

        def run(of: _Sequences) -> None:
            share = self._cut(end_keys, first_keys, of)
            work_tiles, workers, split = list(refs)[-3:]
            _each(self._write_work_tiles, work_tiles, _FIELDS, of, share)
            _each(self._write_workers, workers, _OF_WORKER, of, share)
            _each(self._write_split, split, _OF_SPLIT, of)

        pl.run_scoped(run, scratch, collective_axes="warpgroup")

    def _cut(self, end_ref: Any, first_ref: Any, of: _Sequences) -> jax.Array:
        """Into how many work tiles each sequence is cut, and for which workers; returns the share."""
        layout = plgpu.Layout.WG_STRIDED(of.ends.shape, vec_size=1)
        number = plgpu.broadcasted_iota(jnp.int32, of.ends.shape, 0, layout=layout)
        is_real = number < self.num_seqs
        place = jnp.where(is_real, number, -1)
        end_keys = jnp.where(is_real, gather(end_ref, place, layout), 0)
        first_keys = jnp.zeros_like(end_keys)
        if first_ref is not None:
            first_keys = jnp.where(is_real, gather(first_ref, place, layout), 0)
        first_tile = lax.div(first_keys, self.block_kv)
        end_tile = lax.div(end_keys - 1, self.block_kv) + 1
        num_tiles = jnp.where(first_keys < end_keys, end_tile - first_tile, 0)
        ends = self._running(num_tiles, number, of.sums, layout)
        begins = ends - num_tiles
        share = self._share(begins, ends, jnp.sum(num_tiles))
        first_worker = jnp.minimum(lax.div(begins, share), self.workers - 1)
        counts = jnp.where(num_tiles > 0, lax.div(ends - 1, share) - first_worker + 1, 1)
        counted = jnp.where(is_real, counts + jnp.where(counts > 1, _SPLIT, 0), 0)
        both = self._running(counted, number, of.sums, layout)
        work_ends = both % _SPLIT
        values = of._replace(
            begins=begins,
            ends=ends,
            shift=first_tile - begins,
            end_keys=end_keys,
            first_worker=first_worker,
            last_worker=first_worker + counts - 1,
            work_begins=work_ends - counts,
            work_ends=work_ends,
            num_split=both // _SPLIT,
        )
        for ref, value in zip(of[:-1], values[:-1], strict=True):
            ref[...] = value
        plgpu.commit_smem()
        return share

    def _running(self, numbers: jax.Array, number: jax.Array, sums: Any, layout: Any) -> jax.Array:
        """The sum of each thread's number and of those before it."""

        def add(turn: Any, numbers: jax.Array) -> jax.Array:
            own, distance = sums.at[lax.rem(turn, 2)], lax.shift_left(1, turn)
            own[...] = numbers
            plgpu.commit_smem()
            return numbers + jnp.where(number < distance, 0, gather(own, number - distance, layout))

        return lax.fori_loop(0, (self.num_seqs - 1).bit_length(), add, numbers)

    def _share(self, begins: jax.Array, ends: jax.Array, total: jax.Array) -> jax.Array:
        """Tiles of a worker: `split_schedule` says which."""

        def of(workers: Any) -> jax.Array:
            return jnp.maximum(1, lax.div(total - 1, workers) + 1)

        def cuts(share: jax.Array) -> jax.Array:
            return jnp.sum(jnp.maximum(0, lax.div(ends - 1, share) - lax.div(begins, share)))

        share = first = of(self.workers)
        idle = self.workers // MOST_IDLE if self.num_seqs > 1 else 0
        if idle:
            most_cuts = cuts(first)

            def fitting(fewer: Any, share: jax.Array) -> jax.Array:
                """Of several that fit the one with the fewest idle workers: the smallest."""
                larger = of(self.workers - fewer)
                fits = (2 * cuts(larger) <= most_cuts) & ((MOST_IDLE - 1) * larger <= MOST_IDLE * first)
                return jnp.where(fits & (share == first), larger, share)

            share = lax.fori_loop(1, jnp.where(most_cuts > 0, idle + 1, 1), fitting, first)
        if self.at_once is not None:
            at_once = lax.div(total - 1, self.at_once) + 1
            share = jnp.maximum(share, jnp.minimum(at_once, self.least_share))
        return share

    def _write_work_tiles(self, work_tile: jax.Array, out: Any, of: _Sequences, share: jax.Array) -> None:
        behind = self._below(of.work_ends, work_tile + 1)
        sequence = jnp.minimum(behind, self.num_seqs - 1)
        begin, first_worker = _of(sequence, of.work_begins, of.first_worker)
        worker = first_worker + work_tile - begin
        _store(out, work_tile, self._fields(of, sequence, worker, behind < self.num_seqs, share), _FIELDS)

    def _write_workers(self, worker: jax.Array, out: Any, of: _Sequences, share: jax.Array) -> None:
        sequence, begin = self._work_before(of, worker)
        _, end = self._work_before(of, worker + 1)
        fields = self._fields(of, sequence, worker, begin < end, share)
        _store(out, worker, [begin, end, *(jnp.where(begin < end, field, 0) for field in fields)], _OF_WORKER)

    def _write_split(self, place: jax.Array, out: Any, of: _Sequences) -> None:
        behind = self._below(of.num_split, place + 1)
        sequence = jnp.minimum(behind, self.num_seqs - 1)
        fields = [sequence, *_of(sequence, of.work_begins, of.work_ends)]
        _store(out, place, [jnp.where(behind < self.num_seqs, field, -1) for field in fields], _OF_SPLIT)

    def _work_before(self, of: _Sequences, worker: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first sequence that a worker or one after it has a part of, and the work tiles of workers before it."""
        behind = self._below(of.last_worker, worker)
        sequence = jnp.minimum(behind, self.num_seqs - 1)
        first_worker, begin, end = _of(sequence, of.first_worker, of.work_begins, of.work_ends)
        return sequence, jnp.where(behind < self.num_seqs, begin + jnp.maximum(worker - first_worker, 0), end)

    def _fields(
        self, of: _Sequences, sequence: jax.Array, worker: jax.Array, is_used: jax.Array, share: jax.Array
    ) -> list[jax.Array]:
        """Of a worker's part of a sequence."""
        begins, ends, shift, end_keys = _of(sequence, of.begins, of.ends, of.shift, of.end_keys)
        first = jnp.maximum(begins, worker * share)
        end = jnp.where(is_used, jnp.maximum(first, jnp.minimum(ends, (worker + 1) * share)), first)
        work_begin, work_end = _of(sequence, of.work_begins, of.work_ends)
        return [sequence, first + shift, end + shift, work_end - work_begin, end_keys]

    def _below(self, rising: Any, at: jax.Array) -> jax.Array:
        """How many of the rising numbers of sequences are below each."""
        halvings = self.num_seqs.bit_length()

        def halve(turn: Any, found: jax.Array) -> jax.Array:
            more = found + lax.shift_left(1, halvings - 1 - turn)
            (last,) = _of(jnp.minimum(more, self.num_seqs) - 1, rising)
            return jnp.where((last < at) & (more <= self.num_seqs), more, found)

        none = plgpu.layout_cast(jnp.zeros(at.shape, jnp.int32), _ONE_EACH)
        return lax.fori_loop(0, halvings, halve, none)


def _of(places: jax.Array, *refs: Any) -> tuple[jax.Array, ...]:
    """What stands there in each, a number a thread."""
    return tuple(gather(ref, places, _ONE_EACH) for ref in refs)


def _each(write: Callable[..., None], out: Any, width: int, *operands: Any) -> None:
    """Calls `write` with the numbers of rows of so many fields, a row a thread, and with the others."""
    own = plgpu.broadcasted_iota(jnp.int32, (_THREADS,), 0, layout=_ONE_EACH)

    @pl.loop(0, pl.cdiv(out.shape[0] // width, _THREADS))
    def write_some(turn):
        write(own + turn * _THREADS, out, *operands)


def _store(out: Any, row: jax.Array, fields: list[jax.Array], width: int) -> None:
    """Writes the fields of rows, but for rows that there are none of."""
    first = jnp.where(row * width < out.shape[0], row * width, -width)
    for field, values in enumerate(fields):
        scatter(out, first + field, values, _ONE_EACH)
