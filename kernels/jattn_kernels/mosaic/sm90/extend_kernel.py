"""The kernel of paged extend on Hopper: ragged queries over pages, two warpgroups that take turns at the tensor core.

grid (blocks)             as many as the GPU has SMs; each takes every blocks-th unit of work, the longest first
  a unit                  an item of the schedule (up to `block_tokens` tokens of one request) and a block of heads
  memory warpgroup        TMA: the next unit's q, then k and v a tile of `block_kv` keys at a time, some tiles ahead
  compute warpgroups      64 rows each: S = q k^T, online softmax in base 2, acc += P v; then acc / sum and lse out
  q_full, q_free          memory -> compute, and back: a warpgroup's q has arrived; is in the form that wgmma reads
  k_full, v_full          memory -> compute: the copies of a tile have arrived, and hold nothing past the last key
  k_free, v_free          both compute -> memory: the tile may be overwritten
  turn                    compute <-> compute: while one multiplies, the other does its softmax
shared memory: q of both as it arrives and as wgmma reads it, tiles of k and of v; the output takes q's place

A tile's 64 rows are some heads of one group times as many tokens as fit, head by head: so a prompt reads its prefix
once a kv head even if it has only a few tokens, and the warpgroups of a long one see nearly the same keys. Requests
begin at any token, while wgmma's tiles are made of 8 rows: queries and results pass through untiled staging memory,
where any row may begin, rather than through copies in XLA, which would read and write all of q and out once more.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90 import tiles
from jattn_kernels.mosaic.sm90.extend_schedule import COMPUTE_WARPGROUPS, ExtendTiles, staged_columns
from jattn_kernels.mosaic.sm90.tiles import WGMMA_ROWS, PageCopies, PoolPlace
from jattn_kernels.spec import AttentionSpec

_LOG2E = math.log2(math.e)


class _Unit(NamedTuple):
    """What a block does at one time: an item's fields, and the block of heads."""

    item: Any
    heads: Any
    sequence: Any
    first: Any
    tokens: Any
    key_tiles: Any
    limit: Any
    kv_len: Any


@dataclasses.dataclass(frozen=True)
class ExtendKernel:
    """The kernel of one configuration.

    Attributes:
        heads: Heads that share a tile's rows.
        tile_tokens: Tokens of a tile, each of them one row of each head.
        dtype: Of queries, keys, values and output.
    """

    spec: AttentionSpec
    sizes: ExtendTiles
    page_size: int
    heads: int
    tile_tokens: int
    dtype: Any

    @property
    def copies(self) -> PageCopies:
        return PageCopies.of(self.spec, self.sizes.block_kv, self.page_size)

    @property
    def head_blocks(self) -> int:
        return self.spec.num_q_heads // self.heads

    def blocks(self, num_items: int) -> int:
        """Blocks of the grid."""
        return min(self.sizes.blocks, num_items * self.head_blocks)

    def __call__(self, q, k_pages, v_pages, page_table, items, num_items, layer):
        """Output by token, and lse of each item's rows: float32 [items, blocks of heads, warpgroups, 64]."""
        run: Any = plgpu.kernel(
            self._entry,
            out_type=[
                jax.ShapeDtypeStruct((*q.shape[:2], self.spec.value_dim), self.dtype),
                jax.ShapeDtypeStruct((items.shape[0], self.head_blocks, COMPUTE_WARPGROUPS, WGMMA_ROWS), jnp.float32),
            ],
            grid=(self.blocks(items.shape[0]),),
            grid_names=("block",),
            num_threads=COMPUTE_WARPGROUPS + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=tiles.interpret_params(),
        )
        return run(q, k_pages, v_pages, page_table, items, num_items, layer)

    def _entry(self, *refs):
        spec, sizes, dtype = self.spec, self.sizes, self.dtype
        width = staged_columns(spec)
        both = (COMPUTE_WARPGROUPS, WGMMA_ROWS)
        # A warpgroup's part of the output lies where its own q lies.
        staged_out = plgpu.SMEM((COMPUTE_WARPGROUPS, pl.cdiv(spec.head_dim, width), WGMMA_ROWS, width), dtype)
        filled, freed = (
            tuple(plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages) for stages in sizes.stages)
            for arrivals in (self.copies.copies, COMPUTE_WARPGROUPS)
        )
        pl.run_scoped(
            lambda *scratch: self._body(refs, *scratch),
            (
                tiles.overlaid(tiles.tile((*both, spec.head_dim), dtype), staged_out),
                plgpu.SMEM((*both, width), dtype),
                tiles.probabilities_tile((*both, sizes.block_kv), dtype),
            ),
            (
                tiles.tile((sizes.k_stages, sizes.block_kv, spec.head_dim), dtype),
                tiles.tile((sizes.v_stages, sizes.block_kv, spec.value_dim), dtype),
            ),
            (
                plgpu.Barrier(num_arrivals=self.heads, num_barriers=COMPUTE_WARPGROUPS),
                plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS),
            ),
            filled,
            freed,
            plgpu.Barrier(num_arrivals=self.copies.copies),
            plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
            collective_axes="warpgroup",
        )

    def _body(self, refs, rows_smem, pages_smem, q_barriers, full, free, last_v_full, turn):
        q_ref, k_ref, v_ref, table_ref, items_ref, num_items_ref, layer_ref, out_ref, lse_ref = refs
        (q_smem, out_smem), q_staging, p_smem = rows_smem
        q_full, q_free = q_barriers
        warpgroup = lax.axis_index("warpgroup")
        units = num_items_ref[0] * self.head_blocks
        block, blocks = lax.axis_index("block"), self.blocks(items_ref.shape[0])

        def number(round):
            """Back and forth, so that no block always has the longest of each round."""
            backwards = lax.rem(round, 2) == 1
            return round * blocks + jnp.where(backwards, blocks - 1 - block, block)

        whole_rounds = lax.div(units, blocks)
        rounds = whole_rounds + jnp.where(number(whole_rounds) < units, 1, 0)

        def unit(round):
            of = jnp.minimum(number(round), items_ref.shape[0] * self.head_blocks - 1)
            item = lax.div(of, self.head_blocks)
            return _Unit(item, lax.rem(of, self.head_blocks), *(items_ref[item, field] for field in range(6)))

        @pl.when(warpgroup == COMPUTE_WARPGROUPS)
        def memory():
            plgpu.set_max_registers(40, action="decrease")
            layer = layer_ref[0]

            def load_unit(round, done):
                now = unit(round)
                self._load_queries(q_ref, now, q_staging, q_full, q_free, round == 0)
                head = lax.div(now.heads, self.spec.group_size // self.heads)
                self._load_pages(
                    (k_ref, v_ref), table_ref, now, (layer, head), pages_smem, full, free, last_v_full, done
                )
                return done + now.key_tiles

            done = lax.fori_loop(0, rounds, load_unit, jnp.int32(0))
            for freed, stages in zip(free, self.sizes.stages, strict=True):

                @pl.loop(jnp.maximum(done, stages), done + stages)
                def wait_for_the_last(step, freed=freed, stages=stages):
                    plgpu.barrier_wait(freed.at[lax.rem(step, stages)])

            @pl.when(rounds > 0)
            def wait_for_the_last_queries():
                for w in range(COMPUTE_WARPGROUPS):
                    plgpu.barrier_wait(q_free.at[w])

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def compute():
            plgpu.set_max_registers(232, action="increase")
            own = (None if ref is None else ref.at[warpgroup] for ref in (q_smem, q_staging, p_smem, out_smem))
            own_q, own_staging, own_p, own_out = own

            def attend_unit(round, carry):
                done, now = carry
                following = unit(round + 1)  # read long before it is needed
                skipped = warpgroup * self.tile_tokens
                tokens = jnp.clip(now.tokens - skipped, 0, self.tile_tokens)
                self._take_queries(own_staging, own_q, q_full.at[warpgroup], q_free.at[warpgroup])
                pl.when(warpgroup == 1)(lambda: self._pass(turn))
                acc, top, total = self._attend(
                    own_q, pages_smem, own_p, full, free, turn, now, tokens, now.limit + skipped, done
                )
                pl.when(warpgroup == 0)(lambda: self._pass(turn))

                @pl.when(tokens > 0)
                def store_results():
                    empty = top == -jnp.inf
                    safe_total = jnp.where(empty, 1.0, total)
                    lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(safe_total)) / _LOG2E)
                    lse_ref[now.item, now.heads, warpgroup] = lse
                    out = (acc * lax.broadcast_in_dim(1.0 / safe_total, acc.shape, [0])).astype(self.dtype)
                    self._store_rows(out, out_ref, now.first + skipped, tokens, now.heads * self.heads, own_out)

                return done + now.key_tiles, following

            lax.fori_loop(0, rounds, attend_unit, (jnp.int32(0), unit(0)))
            plgpu.wait_smem_to_gmem(0)

    def _load_queries(self, q_ref, unit, staging, q_full, q_free, is_first):
        """Rows of both tiles, head by head; columns that staging memory has no room for follow the first."""
        width = staging.shape[-1]
        for column in range(0, self.spec.head_dim, width):
            for warpgroup in range(COMPUTE_WARPGROUPS):
                taken = q_free.at[warpgroup]
                pl.when((column > 0) | jnp.logical_not(is_first))(lambda taken=taken: plgpu.barrier_wait(taken))
                # A tile without tokens gets the other's: it takes part in the handshake.
                skipped = warpgroup * self.tile_tokens
                first = unit.first + jnp.where(unit.tokens > skipped, skipped, 0)

                @pl.loop(0, self.heads)
                def load_head(h, column=column, warpgroup=warpgroup, first=first):
                    tokens = pl.ds(first, self.tile_tokens)
                    source = q_ref.at[tokens, unit.heads * self.heads + h, pl.ds(column, width)]
                    rows = pl.ds(h * self.tile_tokens, self.tile_tokens)
                    plgpu.copy_gmem_to_smem(source, staging.at[warpgroup, rows], q_full.at[warpgroup])

    def _take_queries(self, staging, q_smem, q_full, q_free):
        """Rows of a tile into the form that wgmma reads."""
        width = staging.shape[-1]
        for column in range(0, self.spec.head_dim, width):
            plgpu.barrier_wait(q_full)
            q = plgpu.load(staging, layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.wait_smem_to_gmem(0)  # the last unit's output lies where q goes
            # The softmax below takes the largest score before it scales.
            q_smem[:, pl.ds(column, width)] = -q if self.spec.scale < 0 else q
            plgpu.commit_smem()
            plgpu.barrier_arrive(q_free)

    def _load_pages(self, pages_refs, table_ref, unit, place, pages_smem, full, free, last_v_full, done):
        """Tiles of k and v in turn; what lies past the last key is cleared from v."""
        (k_ref, v_ref), (k_smem, v_smem), (k_full, v_full), (k_free, v_free) = pages_refs, pages_smem, full, free
        (k_stages, v_stages), block_kv, copies = self.sizes.stages, self.sizes.block_kv, self.copies
        # Only the sequence's last tile can be partly filled.
        whole = jnp.minimum(unit.key_tiles, lax.div(unit.kv_len, block_kv))

        def pages_of(step):
            return copies.pages(table_ref, unit.sequence, step, unit.kv_len - 1)

        def load_k(step, pages):
            stage = lax.rem(done + step, k_stages)
            pl.when(done + step >= k_stages)(lambda: plgpu.barrier_wait(k_free.at[stage]))
            copies.start(k_ref, PoolPlace(*place, 0), pages, step, k_smem.at[stage], k_full.at[stage])

        def load_v(step, pages):
            stage = lax.rem(done + step, v_stages)
            pl.when(done + step >= v_stages)(lambda: plgpu.barrier_wait(v_free.at[stage]))

            @pl.when(step < whole)
            def whole_tile():
                copies.start(v_ref, PoolPlace(*place, 1), pages, step, v_smem.at[stage], v_full.at[stage])

            @pl.when(step >= whole)
            def last_tile():
                copies.start(v_ref, PoolPlace(*place, 1), pages, step, v_smem.at[stage], last_v_full)
                plgpu.barrier_wait(last_v_full)
                for row in range(0, block_kv, 64):
                    for column in range(0, self.spec.value_dim, 64):  # few registers: 64 x 64 at a time
                        part = v_smem.at[stage, pl.ds(row, 64), pl.ds(column, 64)]
                        tiles.zero_rows_from(part, unit.kv_len - step * block_kv - row)
                for _ in range(copies.copies):
                    plgpu.barrier_arrive(v_full.at[stage])

        def load_tile(step, now):
            following = pages_of(step + 1)  # page numbers come from memory: ask for them a tile ahead
            load_v(step, now)
            pl.when(step + 1 < unit.key_tiles)(lambda: load_k(step + 1, following))
            return following

        first = pages_of(0)
        pl.when(unit.key_tiles > 0)(lambda: load_k(jnp.int32(0), first))
        lax.fori_loop(0, unit.key_tiles, load_tile, first)

    def _store_rows(self, out, out_ref, first, tokens, head, staging):
        """The first `tokens` tokens of each head: those behind them belong to another block."""
        staging = staging.at[0]
        width = staging.shape[-1]
        for column in range(0, self.spec.value_dim, width):
            part = lax.slice(out, (0, column), (WGMMA_ROWS, column + width)) if out.shape[1] > width else out
            if column:
                plgpu.wait_smem_to_gmem(0)
            staging[...] = part
            plgpu.commit_smem()
            for bit in range(self.tile_tokens.bit_length()):
                size = 1 << bit
                done = lax.div(tokens, 2 * size) * (2 * size)

                @pl.when((tokens & size) != 0)
                def store_piece(size=size, done=done, column=column):
                    @pl.loop(0, self.heads)
                    def store_head(h):
                        target = out_ref.at[pl.ds(first + done, size), head + h, pl.ds(column, width)]
                        plgpu.copy_smem_to_gmem(staging.at[pl.ds(h * self.tile_tokens + done, size)], target)

    def _attend(self, q_smem, pages_smem, p_smem, full, free, turn, unit, tokens, limit, done):
        """Unnormalised output, largest scaled score (base 2) and sum of each row."""
        (k_smem, v_smem), (k_full, v_full), (k_free, v_free) = pages_smem, full, free
        (k_stages, v_stages), block_kv = self.sizes.stages, self.sizes.block_kv
        factor = abs(self.spec.scale) * _LOG2E
        per_row = plgpu.Layout.WGMMA.reduce(1)
        kv_len, key_tiles = unit.kv_len, unit.key_tiles
        # Keys that the tile's first and last token see.
        least = jnp.clip(limit, 0, kv_len) if self.spec.causal else kv_len
        most = jnp.clip(limit + tokens - 1, 0, kv_len) if self.spec.causal else kv_len
        steps = jnp.where(tokens > 0, jnp.minimum(pl.cdiv(most, block_kv), key_tiles), 0)
        unmasked = jnp.minimum(lax.div(least, block_kv), steps)

        def wait_for_k(step):
            pl.when(step < steps)(lambda: plgpu.barrier_wait(k_full.at[lax.rem(done + step, k_stages)]))

        def attend_tile(step, carry, masked):
            acc, top, total = carry
            k_stage, v_stage = lax.rem(done + step, k_stages), lax.rem(done + step, v_stages)

            def scores(ref):
                plgpu.wgmma(ref, q_smem, k_smem.at[k_stage].transpose((1, 0)))
                self._pass(turn)
                return ref[...]

            s = pl.run_scoped(scores, tiles.accumulator(WGMMA_ROWS, block_kv))
            plgpu.barrier_arrive(k_free.at[k_stage])
            if masked:
                s = jnp.where(visible(step * block_kv), s * factor, -jnp.inf)
                new_top = jnp.maximum(top, s.max(axis=1))
                shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                p = jnp.exp2(s - lax.broadcast_in_dim(shift, s.shape, [0]))
            else:
                new_top = shift = jnp.maximum(top, s.max(axis=1) * factor)
                p = jnp.exp2(s * factor - lax.broadcast_in_dim(shift, s.shape, [0]))  # one fused multiply-add each
            keep = jnp.exp2(top - shift)
            acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0])
            total = total * keep
            probabilities = p.astype(self.dtype)
            if self.spec.head_dim <= 128:
                total = total + p.sum(axis=1)
                acc, total, new_top, probabilities = lax.optimization_barrier((acc, total, new_top, probabilities))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_full.at[v_stage])
            plgpu.barrier_wait(turn)
            if self.spec.head_dim > 128:
                total = total + p.sum(axis=1)
            next_k = functools.partial(wait_for_k, step + 1)
            acc = tiles.add_product(acc, probabilities, v_smem.at[v_stage], p_smem, meanwhile=next_k)
            plgpu.barrier_arrive(v_free.at[v_stage])
            return acc, new_top, total

        def visible(key):
            shape = (WGMMA_ROWS, block_kv)
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            if not self.spec.causal:
                return column < kv_len - key
            row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=per_row)
            bound = jnp.minimum(limit + lax.rem(row, self.tile_tokens), kv_len) - key
            return column < lax.broadcast_in_dim(bound, shape, [0])

        def skip_tile(step):
            """Keeps the others' time: the memory and the other warpgroup still have this tile to do."""
            for filled, freed, stages in zip(full, free, self.sizes.stages, strict=True):
                stage = lax.rem(done + step, stages)
                plgpu.barrier_wait(filled.at[stage])
                plgpu.barrier_arrive(freed.at[stage])
                self._pass(turn)

        carry = (
            plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, self.spec.value_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((WGMMA_ROWS,), -jnp.inf, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((WGMMA_ROWS,), jnp.float32), per_row),
        )
        wait_for_k(0)
        carry = lax.fori_loop(0, unmasked, lambda step, carry: attend_tile(step, carry, masked=False), carry)
        carry = lax.fori_loop(unmasked, steps, lambda step, carry: attend_tile(step, carry, masked=True), carry)
        pl.loop(steps, key_tiles)(skip_tile)
        return carry

    def _pass(self, turn):
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)
