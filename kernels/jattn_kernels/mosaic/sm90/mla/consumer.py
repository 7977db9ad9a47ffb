"""A consumer warpgroup of the latent kernel: online softmax (Milakov & Gimelshein 2018) of its tile of each pair.

Mosaic puts no barriers around stores here. All threads arrive on every barrier: what they store for the other consumer
to load needs none. Two are asked for by name: before stores where products of other warps may still read, and before
products that read what all warps stored.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.logits import LOG2E, base2_logits
from jattn_kernels.mosaic.sm90.common.work_tiles import WorkTile, WorkTiles, walk
from jattn_kernels.mosaic.sm90.mla.config import (
    BLOCK_KV,
    BLOCK_ROWS,
    CONSUMERS,
    PAIR,
    LatentConfig,
    Operands,
    SharedMemory,
)

_PER_ROW, _PER_KEY = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
_SHAPE = (BLOCK_ROWS, BLOCK_KV)


class _State(NamedTuple):
    """Unnormalised output of this consumer's columns, each row's largest logit m_i in base 2, and the sum l_i of
    exponentials of this consumer's tiles."""

    acc: Any  # [64, C / 2] float32
    m_i: Any  # [64]
    l_i: Any  # [64]


class _Rows(NamedTuple):
    """Bounds of the keys that a work tile's rows see, and the factor of their products; None where there is none."""

    first: Any
    end: Any
    factor: Any


class Consumer:
    """One consumer warpgroup.

    Args:
        number: Which one: a Python number.
    """

    def __init__(self, config: LatentConfig, operands: Operands, scratch: SharedMemory, number: int):
        self._config, self._operands, self._scratch = config, operands, scratch
        self._number, self._peer = number, 1 - number
        self._row_block = lax.axis_index("rows")

    def run(self, out_refs, work_tiles: WorkTiles) -> None:
        """What the warpgroup does for a worker's work tiles."""
        scratch, half = self._scratch, self._config.half
        scratch.zeros[self._number] = jnp.int32(0)
        plgpu.commit_smem()

        def attend_work_tile(number, now, _, state):
            plgpu.barrier_wait(scratch.q_full)
            rows = self._load_rows(now)
            start = _State(
                plgpu.layout_cast(jnp.zeros((BLOCK_ROWS, half), jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((BLOCK_ROWS,), -jnp.inf, jnp.float32), _PER_ROW),
                plgpu.layout_cast(jnp.zeros((BLOCK_ROWS,), jnp.float32), _PER_ROW),
            )
            whole = jnp.clip(lax.div(self._operands.whole_end[now.sequence], PAIR), now.first, now.end)
            attend = functools.partial(self._attend_pair, now, rows)
            sums = lax.fori_loop(now.first, whole, functools.partial(attend, False), start)
            sums = lax.fori_loop(whole, now.end, functools.partial(attend, True), sums)
            pl.when(now.first == now.end)(lambda: plgpu.barrier_arrive(scratch.q_empty))
            self._store(sums, out_refs, now, number, lax.rem(number - work_tiles.begin, 2))
            return state

        walk(self._operands, work_tiles, attend_work_tile, jnp.int32(0))

    def _attend_pair(self, work_tile: WorkTile, rows: _Rows, is_masked: bool, pair, state: _State) -> _State:
        """Both tiles of a pair, the own one first, whose probabilities are in registers."""
        tile, places = pair * CONSUMERS + self._number, self._places()
        s = self._logits(work_tile, rows, tile, places, is_masked)
        plgpu.commit_smem()  # products with the keys have ended in all warps: `pe` and rows are written over
        if is_masked:
            self._clear_unowned(work_tile, tile)
        return (self._attend_first, self._attend_second)[self._number](s, places, state)

    def _attend_first(self, s, places, state: _State) -> _State:
        """The first consumer's: its maximum is handed on at once, its probabilities once they are of the pair's."""
        scratch, dtype = self._scratch, self._config.dtype
        m_first = self._new_maximum(s, state.m_i)
        scratch.maxima[0] = m_first
        plgpu.barrier_arrive(scratch.m_full)
        p, alpha = self._exponentials(s, m_first), jnp.exp2(state.m_i - _shift(m_first))
        l_i = state.l_i * alpha + p.sum(axis=1)

        def hand_over():
            plgpu.barrier_wait(scratch.p_full.at[1])
            to_pair = jnp.exp2(m_first - _shift(_load(scratch.maxima.at[1])))
            scratch.pe.at[places[0]][...] = (p * _spread(to_pair)).astype(dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.p_full.at[0])

        acc, own = _scaled(state.acc, alpha), scratch.own.at[places[0]]
        acc = tiles.add_product(acc, p.astype(dtype), own, scratch.of_registers[0], hand_over)
        plgpu.barrier_arrive(scratch.own_empty.at[0])
        m_pair = _load(scratch.maxima.at[1])
        to_pair = jnp.exp2(m_first - _shift(m_pair))
        acc = self._add_other(places, _scaled(acc, to_pair))
        return _State(acc, m_pair, l_i * to_pair)

    def _attend_second(self, s, places, state: _State) -> _State:
        """The second consumer's, whose maximum is the pair's: of the first one's it waits for no more at first."""
        scratch = self._scratch
        plgpu.barrier_wait(scratch.m_full)
        m_pair = self._new_maximum(s, _load(scratch.maxima.at[0]))
        p, alpha = self._exponentials(s, m_pair), jnp.exp2(state.m_i - _shift(m_pair))
        rounded = p.astype(self._config.dtype)
        scratch.maxima[1] = m_pair
        scratch.pe.at[places[1]][...] = rounded
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.p_full.at[1])
        l_i = state.l_i * alpha + p.sum(axis=1)
        acc, own = _scaled(state.acc, alpha), scratch.own.at[places[1]]
        acc = tiles.add_product(acc, rounded, own, scratch.of_registers[1])
        plgpu.barrier_arrive(scratch.own_empty.at[1])
        plgpu.barrier_wait(scratch.p_full.at[0])
        return _State(self._add_other(places, acc), m_pair, l_i)

    def _add_other(self, places, acc):
        """Adds the other consumer's tile: this half of its values."""
        place = places[self._peer]
        acc = tiles.accumulate(acc, self._scratch.pe.at[place], self._scratch.other.at[place])
        plgpu.barrier_arrive(self._scratch.other_empty.at[self._peer])
        return acc

    def _new_maximum(self, s, m_i):
        return jnp.maximum(m_i, s.max(axis=1) * self._unit)

    def _exponentials(self, s, m_i):
        return jnp.exp2(s * self._unit - _spread(_shift(m_i)))

    @property
    def _is_scaled_late(self) -> bool:
        """Whether products are scaled in the exponent: where nothing else is done to them, and the largest stays so."""
        spec = self._config.spec
        return self._operands.logit_factor is None and spec.logits_soft_cap is None and spec.scale > 0

    @property
    def _unit(self) -> float:
        """What `_logits` are multiplied by in the exponent, which takes no instruction of its own."""
        return self._config.spec.scale * LOG2E if self._is_scaled_late else 1.0

    def _logits(self, work_tile: WorkTile, rows: _Rows, tile, places, is_masked: bool):
        """Logits over ln 2 and over `_unit` of this consumer's tile; -inf where a row does not see a key."""

        def products(ref):
            self._start_products(ref, places)
            return ref[...]

        s = pl.run_scoped(products, tiles.accumulator(*_SHAPE))
        return self._as_logits(s, work_tile, rows, tile, is_masked)

    def _start_products(self, ref, places) -> None:
        """Starts the products of queries and keys of this consumer's tile."""
        scratch, number, peer = self._scratch, self._number, self._peer
        own, other = places[number], places[peer]
        plgpu.barrier_wait(scratch.own_full.at[number])
        plgpu.wgmma(ref, scratch.q.at[own], scratch.own.at[own].transpose((1, 0)))
        plgpu.barrier_wait(scratch.other_full.at[number])
        plgpu.wgmma(ref, scratch.q.at[other], scratch.other.at[own].transpose((1, 0)))
        plgpu.wgmma(ref, scratch.q_pe, scratch.pe.at[own].transpose((1, 0)))

    def _as_logits(self, s, work_tile: WorkTile, rows: _Rows, tile, is_masked: bool):
        """What `_logits` gives, of products that have ended."""
        is_last = lax.div(tile, CONSUMERS) + 1 == work_tile.end
        pl.when(is_last)(lambda: plgpu.barrier_arrive(self._scratch.q_empty))  # the next ones come during what is left
        if not self._is_scaled_late:
            s = base2_logits(s, self._config.spec, factor=rows.factor)
        return jnp.where(self._visible(work_tile, rows, tile), s, -jnp.inf) if is_masked else s

    def _visible(self, work_tile: WorkTile, rows: _Rows, tile):
        """Which keys of a tile each row sees."""
        column = plgpu.broadcasted_iota(jnp.int32, _SHAPE, 1, layout=plgpu.Layout.WGMMA)
        begin = tile * BLOCK_KV
        end = work_tile.end_key - begin
        seen = column < (end if rows.end is None else _spread(jnp.minimum(rows.end - begin, end)))
        if rows.first is not None:
            seen &= column >= _spread(rows.first - begin)
        if self._operands.mask is not None:
            first = jnp.minimum(tile, self._operands.mask.shape[1] // BLOCK_KV - 1) * BLOCK_KV
            words = self._operands.mask.at[work_tile.sequence, pl.ds(first, BLOCK_KV)]
            word = lax.broadcast_in_dim(plgpu.load(words, layout=_PER_KEY, optimized=False), _SHAPE, [1])
            row = plgpu.broadcasted_iota(jnp.int32, _SHAPE, 0, layout=plgpu.Layout.WGMMA)
            token = lax.div(self._row_block * BLOCK_ROWS + row, self._config.spec.num_q_heads)
            seen &= (lax.shift_right_logical(word, token) & 1) == 1
        return seen

    def _places(self):
        """The numbers of the first and second consumer's tiles, as a compiler cannot foresee them.

        Addresses of products are then reckoned where they are needed: known ones of 36 steps are all reckoned before
        the loop, which takes more registers than there are.
        """
        zero = self._scratch.zeros[self._number]
        return zero, zero + 1

    def _clear_unowned(self, work_tile: WorkTile, tile) -> None:
        """Clears rows of this consumer's tile that the sequence does not own: 0 * NaN is NaN."""
        left = work_tile.end_key - tile * BLOCK_KV

        @pl.when(left < BLOCK_KV)
        def clear():
            for values in (self._scratch.own, self._scratch.other):
                for begin in range(0, self._config.half, BLOCK_KV):
                    tiles.zero_rows_from(values.at[self._number, :, pl.ds(begin, BLOCK_KV)], left)

    def _load_rows(self, work_tile: WorkTile) -> _Rows:
        operands, rows = self._operands, pl.ds(self._row_block * BLOCK_ROWS, BLOCK_ROWS)

        def of_rows(ref):
            return None if ref is None else _load(ref.at[work_tile.sequence, rows])

        factor = None
        if operands.logit_factor is not None:
            factor = operands.logit_factor[jnp.minimum(work_tile.sequence, operands.logit_factor.shape[0] - 1), 0]
        return _Rows(of_rows(operands.first), of_rows(operands.end), factor)

    def _store(self, state: _State, out_refs, work_tile: WorkTile, number, slot) -> None:
        """The result of a work tile: where the sequence's lies, or among the splits."""
        scratch, own, peer = self._scratch, self._number, self._peer
        out_ref, lse_ref, split_outs_ref, split_lses_ref = out_refs
        scratch.sums[slot, own] = state.l_i
        plgpu.barrier_arrive(scratch.sum_full.at[slot * CONSUMERS + own])
        plgpu.barrier_wait(scratch.sum_full.at[slot * CONSUMERS + peer])
        l_i = state.l_i + _load(scratch.sums.at[slot, peer])
        empty = state.m_i == -jnp.inf
        safe_l_i = jnp.where(empty, 1.0, l_i)
        share = 1.0 / safe_l_i
        if self._operands.out_factor is not None:
            share = share * self._operands.out_factor[0]
        out = _scaled(state.acc, share)
        lse = jnp.where(empty, -jnp.inf, (state.m_i + jnp.log2(safe_l_i)) / LOG2E)
        rows = pl.ds(self._row_block * BLOCK_ROWS, BLOCK_ROWS)
        columns = pl.ds(own * self._config.half, self._config.half)

        @pl.when(work_tile.splits > 1)
        def store_split():
            place = number if self._operands.places is None else self._operands.places[number]
            split_outs_ref[place, 0, rows, columns] = out
            if own == 0:
                split_lses_ref[place, 0, rows] = lse

        @pl.when(work_tile.splits == 1)
        def store_sequence():
            out_ref[work_tile.sequence, 0, rows, columns] = out.astype(self._config.dtype)
            if own == 0:
                lse_ref[work_tile.sequence, 0, rows] = lse


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=_PER_ROW, optimized=False)


def _shift(m_i):
    """What is taken off logits; nothing where no key is seen yet."""
    return jnp.where(m_i == -jnp.inf, 0.0, m_i)


def _spread(of_rows):
    """A number of each row, for every key."""
    return lax.broadcast_in_dim(of_rows, _SHAPE, [0])


def _scaled(acc, of_rows):
    return acc * lax.broadcast_in_dim(of_rows, acc.shape, [0])
