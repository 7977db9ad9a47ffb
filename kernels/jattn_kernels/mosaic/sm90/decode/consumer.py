"""A consumer warpgroup of the decode kernel: online softmax (Milakov & Gimelshein 2018) over its share of tiles."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles, turned_values
from jattn_kernels.mosaic.sm90.common.convert import (
    Rotation,
    dequantise,
    dequantise_tile,
    rotate_keys,
    rotate_queries_back,
)
from jattn_kernels.mosaic.sm90.common.logits import base2_logits
from jattn_kernels.mosaic.sm90.common.split_rows import split_rows
from jattn_kernels.mosaic.sm90.common.work_tiles import WorkTile, WorkTiles, walk
from jattn_kernels.mosaic.sm90.decode.config import DecodeConfig, Operands, SharedMemory
from jattn_kernels.mosaic.sm90.decode.new_token import NewToken
from jattn_kernels.mosaic.sm90.decode.producer import steps_of
from jattn_kernels.mosaic.sm90.decode.results import Results, State

_COLUMNS = 64  # of latents that are in registers at a time
_OF_ROWS = plgpu.Layout.WGMMA.reduce(0)


class _Rows(NamedTuple):
    """A work tile's rows: bounds, scalars if of one token, vectors if of several, or None; and queries."""

    first: Any
    end: Any
    position: Any
    queries: Any


class Consumer:
    """One consumer warpgroup.

    Args:
        number: Which one: a Python number.
    """

    def __init__(self, config: DecodeConfig, operands: Operands, scratch: SharedMemory, number: int):
        self._config, self._operands, self._number = config, operands, number
        own = lax.axis_index("warpgroup")
        self._converted = jax.tree.map(lambda ref: ref.at[own], scratch.converted)
        self._p_smem = scratch.p.at[own]
        self._q_split = jax.tree.map(lambda ref: ref.at[own], scratch.q_split)
        self._scratch = scratch
        self._shape = (config.sizes.block_kv, config.sizes.block_rows)
        self._head, self._row_block = lax.axis_index("head"), lax.axis_index("rows")
        self._results = Results(config, operands, scratch, number, (self._head, self._row_block))
        self._slopes = self._load_slopes()
        self._key_rotations = self._load_key_rotations()

    def run(self, out_refs, work_tiles: WorkTiles) -> None:
        """What the warpgroup does for a worker's work tiles."""
        scratch, others = self._scratch, range(1, self._config.sizes.warpgroups)
        begin, end, _ = work_tiles

        def attend_work_tile(number, now, following, done):
            slot = lax.rem(number - begin, 2)
            bounds = (
                self._of_rows(self._operands.first, now),
                now.end_key if self._operands.end is None else self._of_rows(self._operands.end, now),
                self._of_rows(self._operands.position, now),
            )
            q_smem, sizes, new = scratch.q.at[slot], None, None
            if self._config.projected:
                new = NewToken(self._config, self._operands, self._head, now)
                new.make_queries(q_smem if self._config.whole_queries else q_smem.at[0])
            else:
                plgpu.barrier_wait(scratch.q_full.at[slot])
            if self._config.whole_queries:
                q_smem, sizes = self._split_queries(q_smem)
                if new is None:
                    plgpu.barrier_arrive(scratch.q_empty.at[slot])
            state = self._attend(now, _Rows(*bounds, self._queries(q_smem)), q_smem, sizes, done, new)
            if new is not None:
                new.write()
            elif not self._config.whole_queries:
                plgpu.barrier_arrive(scratch.q_empty.at[slot])
            if self._number:
                self._results.send_partial(state, is_first=number == begin)
            else:
                for other in others:
                    state = self._results.merged(state, other)
                self._results.store(state, out_refs, now, number)
            return done + steps_of(now, self._config) * self._config.sizes.warpgroups

        walk(self._operands, work_tiles, attend_work_tile, jnp.int32(0))
        if self._number:
            # The first warpgroup has taken the last result: nothing may be under way when the block ends.
            pl.when(begin < end)(lambda: plgpu.barrier_wait(scratch.partials_empty.at[self._number - 1]))
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _attend(self, work_tile: WorkTile, rows: _Rows, q_smem, sizes, done, new: NewToken | None = None) -> State:
        """This warpgroup's tiles of a work tile: each `warpgroups`-th, from its own number on.

        Args:
            new: The sequence's own token, where it is made here.
        """
        config, scratch, operands = self._config, self._scratch, self._operands
        block_kv, stages, warpgroups = self._shape[0], config.sizes.stages, config.sizes.warpgroups
        (k_smem, *_), (k_full, *_), (k_empty, *_) = scratch.pages, scratch.full, scratch.empty
        (*_, v_smem), (*_, v_full), (*_, v_empty) = scratch.pages, scratch.full, scratch.empty
        latent = config.sizes.latent
        factor = None
        if operands.logit_factor is not None:
            of = jnp.minimum(work_tile.sequence, operands.logit_factor.shape[0] - 1)
            factor = operands.logit_factor[of, self._head]
        if sizes is not None:
            factor = sizes if factor is None else sizes * factor

        def stage_of(step):
            return lax.rem(done + step * warpgroups + self._number, stages)

        def tile_of(step):
            return work_tile.first + step * warpgroups + self._number

        def put_value(stage, tile):
            if new is not None:
                new.put(v_smem.at[stage], 1, tile)

        def attend_tile(step, carry):
            (acc, m_i, l_i), (mask, tile_rotation) = carry
            tile, stage = tile_of(step), stage_of(step)
            key = plgpu.broadcasted_iota(jnp.int32, self._shape, 0, layout=plgpu.Layout.WGMMA) + tile * block_kv
            following = self._load_of_tile(work_tile, tile_of(step + 1))
            values = self._converted.values if config.dequantises else v_smem.at[stage]
            if latent and not config.dequantises:
                values = values.at[:, pl.ds(0, config.width)]
            if config.rotates:
                rotate_queries_back(rows.queries, self._converted.queries, tile_rotation)
            plgpu.barrier_wait(k_full.at[stage])
            if new is not None:
                new.put(k_smem.at[stage], 0, tile)
            if config.rotates:
                self._rotate_keys(k_smem.at[stage])
                plgpu.barrier_arrive(k_empty.at[stage])

            def scores(ref):
                if config.rotates:
                    plgpu.wgmma(ref, self._converted.keys, self._converted.queries.transpose((1, 0)))
                elif config.stacks:
                    plgpu.wgmma(ref, k_smem.at[stage], q_smem.transpose((1, 0)))
                else:
                    for part in range(config.q_parts):
                        own = part
                        if config.whole_queries:  # by the interpreter
                            own = pl.ds(part * self._shape[1], self._shape[1])
                        plgpu.wgmma(ref, k_smem.at[stage], q_smem.at[own].transpose((1, 0)))
                if config.turns:
                    plgpu.barrier_wait(v_full.at[stage])
                    put_value(stage, tile)
                    keys_left = work_tile.end_key - tile * block_kv
                    pl.when(keys_left < block_kv)(lambda: turned_values.zero_rows_from(v_smem.at[stage], keys_left))
                    columns = turned_values.turned(v_smem.at[stage])
                    plgpu.barrier_arrive(v_empty.at[stage])
                    return ref[...], columns
                if config.dequantises and latent:
                    dequantise_tile(v_smem.at[stage, :, pl.ds(0, config.width)], values)
                elif config.dequantises:
                    plgpu.barrier_wait(v_full.at[stage])
                    put_value(stage, tile)
                    dequantise(v_smem.at[stage], values)
                    plgpu.barrier_arrive(v_empty.at[stage])
                return ref[...], None

            columns = self._shape[1] * (config.q_parts if config.stacks else 1)
            s, turned = pl.run_scoped(scores, tiles.accumulator(block_kv, columns))
            if config.stacks:
                parts = [s[:, begin : begin + self._shape[1]] for begin in range(0, columns, self._shape[1])]
                s = functools.reduce(operator.add, parts)
            if not config.rotates and (config.dequantises or not latent):
                plgpu.barrier_arrive(k_empty.at[stage])
            distance = None if rows.position is None else key - self._spread(rows.position)
            s = base2_logits(s, config.spec, factor=factor, slope=self._slopes, distance=distance)
            s = jnp.where(self._visible(key, rows, mask), s, -jnp.inf)

            m_new = jnp.maximum(m_i, s.max(axis=0))
            shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
            p = jnp.exp2(s - self._spread(shift))
            alpha = jnp.exp2(m_i - shift)
            self._p_smem.transpose((1, 0))[...] = p.astype(config.dtype)
            plgpu.commit_smem()
            acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [1])
            l_i = l_i * self._spread(alpha) + p  # summed over the keys in the end
            if config.turns:
                acc = tiles.accumulate(acc, turned, self._p_smem.transpose((1, 0)))
                return State(acc, m_new, l_i), following
            if not config.dequantises and not latent:
                plgpu.barrier_wait(v_full.at[stage])
                put_value(stage, tile)
            keys_left = work_tile.end_key - tile * block_kv
            pl.when(keys_left < block_kv)(lambda: self._zero_rows_from(values, keys_left))
            acc = tiles.accumulate(acc, values.transpose((1, 0)), self._p_smem.transpose((1, 0)))
            if not config.dequantises:
                plgpu.barrier_arrive(v_empty.at[stage])
            return State(acc, m_new, l_i), following

        def skip_tile(step):
            """An empty one: the producer warpgroup waits for it too."""
            stage = stage_of(step)
            for filled, emptied in zip(scratch.full, scratch.empty, strict=True):
                plgpu.barrier_wait(filled.at[stage])
                plgpu.barrier_arrive(emptied.at[stage])

        start = State(
            plgpu.layout_cast(jnp.zeros((config.width, self._shape[1]), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full(self._shape[1:], -jnp.inf, jnp.float32), _OF_ROWS),
            plgpu.layout_cast(jnp.zeros(self._shape, jnp.float32), plgpu.Layout.WGMMA),
        )
        steps = lax.div(jnp.maximum(work_tile.end - work_tile.first - self._number, 0) + warpgroups - 1, warpgroups)
        state, _ = lax.fori_loop(0, steps, attend_tile, (start, self._load_of_tile(work_tile, tile_of(0))))
        if self._number:
            pl.loop(steps, steps_of(work_tile, config))(skip_tile)
        return State(state.acc, state.m_i, state.l_i.sum(axis=0))

    def _zero_rows_from(self, values, keys_left) -> None:
        """Clears rows of values that the sequence does not own, as many columns at a time as registers can take."""
        if not self._config.sizes.latent:
            tiles.zero_rows_from(values, keys_left)
            return
        for begin in range(0, self._config.width, _COLUMNS):
            tiles.zero_rows_from(values.at[:, pl.ds(begin, _COLUMNS)], keys_left)

    def _spread(self, of_rows):
        """A number of each row, or one for all, for every key."""
        return lax.broadcast_in_dim(of_rows, self._shape, [1]) if jnp.ndim(of_rows) else of_rows

    def _of_rows(self, ref, work_tile: WorkTile):
        """What memory holds of a work tile's rows."""
        if ref is None:
            return None
        if self._config.num_tokens == 1:
            return ref[work_tile.sequence]
        rows = pl.ds(self._row_block * self._shape[1], self._shape[1])
        return plgpu.load(ref.at[work_tile.sequence, rows], layout=_OF_ROWS, optimized=False)

    def _load_slopes(self):
        if self._operands.slopes is None:
            return None
        rows = self._config.rows_of_block(self._head, self._row_block)
        slopes = plgpu.load(self._operands.slopes.at[rows], layout=_OF_ROWS, optimized=False)
        return self._spread(slopes)

    def _load_key_rotations(self):
        if not self._config.rotates:
            return None
        parts = self._operands.key_rotations
        return Rotation(*(plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False) for part in parts))

    def _load_of_tile(self, work_tile: WorkTile, tile):
        """What memory holds for a tile, read a tile early: mask words of its keys, and its first key's rotation."""
        operands, block_kv = self._operands, self._shape[0]
        load: Any = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        mask = rotation = None
        if operands.mask is not None:
            first = jnp.minimum(tile, operands.mask.shape[1] // block_kv - 1) * block_kv
            mask = load(operands.mask.at[work_tile.sequence, pl.ds(first, block_kv)])
        if self._config.rotates:
            which = jnp.minimum(tile, operands.tile_rotations.cos.shape[0] - 1)
            rotation = Rotation(*(load(part.at[which]) for part in operands.tile_rotations))
        return mask, rotation

    def _rotate_keys(self, source) -> None:
        target = self._converted.keys
        if self._config.dequantises:
            dequantise(source, target)
            source = target
        assert self._key_rotations is not None
        rotate_keys(source, target, self._key_rotations)

    def _queries(self, q_smem):
        """Both halves of queries that are rotated for each tile, in registers."""
        if not self._config.rotates:
            return None
        half = self._config.spec.head_dim // 2
        halves = (q_smem.at[pl.ds(begin, half)] for begin in (0, half))
        queries = tuple(plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False) for part in halves)
        plgpu.commit_smem()  # the next ones are copied there, and not every warpgroup has a tile to rotate before
        return queries

    def _split_queries(self, whole):
        """Parts of queries that came whole, and what is to be multiplied with their products."""
        parts, sizes = self._q_split
        plgpu.commit_smem()  # all warps are done with those of the last work tile
        split_rows(whole, parts, sizes)
        plgpu.commit_smem()
        return parts, self._spread(plgpu.load(sizes, layout=_OF_ROWS, optimized=False))

    def _visible(self, key, rows: _Rows, mask):
        """Which keys of a tile each row sees."""
        seen = key < self._spread(rows.end)
        if rows.first is not None:
            seen &= key >= self._spread(rows.first)
        if mask is not None:
            word = lax.broadcast_in_dim(mask, key.shape, [0])
            if self._config.num_tokens > 1:  # one token has all rows, which may be those of several heads
                row = plgpu.broadcasted_iota(jnp.int32, key.shape, 1, layout=plgpu.Layout.WGMMA)
                token = lax.div(self._row_block * self._shape[1] + row, self._config.spec.group_size)
                word = lax.shift_right_logical(word, token)
            seen &= (word & 1) == 1
        return seen
