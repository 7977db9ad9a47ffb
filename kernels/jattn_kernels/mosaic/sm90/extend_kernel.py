"""The kernel of extend on Hopper: ragged queries over keys, two warpgroups that take turns at the tensor core.

grid (blocks)             as many as the GPU has SMs; each takes every blocks-th unit of work, the longest first
  a unit                  an item of the schedule (up to `block_tokens` tokens of one request) and a block of heads
  memory warpgroup        TMA: the next unit's q, then k and v a tile of `block_kv` keys at a time, some tiles ahead
  compute warpgroups      64 rows each: S = q k^T, online softmax in base 2, acc += P v; then acc / sum and lse out
  q_full, q_free          memory -> compute, and back: a warpgroup's q has arrived; is in the form that wgmma reads
  k_full, v_full          memory -> compute: the copies of a tile have arrived, and v holds nothing but the request's
  k_free, v_free          both compute -> memory: the tile may be overwritten
  turn                    compute <-> compute: while one multiplies, the other does its softmax
shared memory: q of both as it arrives and as wgmma reads it, tiles of k and of v; the output takes q's place

A tile's 64 rows are some heads of one group times as many tokens as fit, head by head: so a prompt reads its prefix
once a kv head even if it has only a few tokens, and the warpgroups of a long one see nearly the same keys. Requests
begin at any token, while wgmma's tiles are made of 8 rows: queries and results pass through untiled staging memory,
where any row may begin, rather than through copies in XLA, which would read and write all of q and out once more.

Of a request's tiles of keys a unit reads those that some row of it sees, and a warpgroup skips what no row of its own
sees. Only tiles that some of its rows do not see whole are masked; where neither window nor chunk, mask nor position
is given, one number a unit tells which. Features that a call does not use leave nothing in its kernel.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90 import tiles
from jattn_kernels.mosaic.sm90.extend_memory import ExtendMemory
from jattn_kernels.mosaic.sm90.extend_rows import COMPUTE_WARPGROUPS
from jattn_kernels.mosaic.sm90.extend_schedule import ExtendTiles, staged_columns, staged_pieces
from jattn_kernels.mosaic.sm90.extend_tile import Operands, TileRows, Unit
from jattn_kernels.mosaic.sm90.logits import LOG2E
from jattn_kernels.mosaic.sm90.row_copies import RowCopies
from jattn_kernels.mosaic.sm90.tiles import WGMMA_ROWS, PageCopies
from jattn_kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class ExtendKernel:
    """The kernel of one configuration.

    Attributes:
        copies: Of a tile of keys or values.
        heads: Heads that share a tile's rows.
        tile_tokens: Tokens of a tile, each of them one row of each head.
        dtype: Of queries, keys, values and output.
    """

    spec: AttentionSpec
    sizes: ExtendTiles
    copies: PageCopies | RowCopies
    heads: int
    tile_tokens: int
    dtype: Any

    @property
    def head_blocks(self) -> int:
        return self.spec.num_q_heads // self.heads

    def blocks(self, num_items: int) -> int:
        """Blocks of the grid."""
        return min(self.sizes.blocks, num_items * self.head_blocks)

    def __call__(self, operands: Operands):
        """Output by token, and lse of each item's rows: float32 [items, blocks of heads, warpgroups, 64]."""
        num_items = operands.items.shape[0]
        leaves, tree = jax.tree.flatten(operands)
        run: Any = plgpu.kernel(
            functools.partial(self._entry, tree),
            out_type=[
                jax.ShapeDtypeStruct((*operands.q.shape[:2], self.spec.value_dim), self.dtype),
                jax.ShapeDtypeStruct((num_items, self.head_blocks, COMPUTE_WARPGROUPS, WGMMA_ROWS), jnp.float32),
            ],
            grid=(self.blocks(num_items),),
            grid_names=("block",),
            num_threads=COMPUTE_WARPGROUPS + 1,
            thread_name="warpgroup",
            kernel_name="paged_extend",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=tiles.interpret_params(),
        )
        return run(*leaves)

    def _entry(self, tree, *refs):
        spec, sizes, dtype = self.spec, self.sizes, self.dtype
        operands, out_refs = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves :]
        width = staged_columns(spec)
        both = (COMPUTE_WARPGROUPS, WGMMA_ROWS)
        # A warpgroup's part of the output lies where its own q lies.
        staged_out = plgpu.SMEM((COMPUTE_WARPGROUPS, WGMMA_ROWS * spec.head_dim // width, width), dtype)
        filled, freed = (
            tuple(plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages) for stages in sizes.stages)
            for arrivals in (self.copies.copies, COMPUTE_WARPGROUPS)
        )
        pl.run_scoped(
            lambda *scratch: self._body(operands, out_refs, *scratch),
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

    def _body(self, operands, out_refs, rows_smem, pages_smem, q_barriers, full, free, last_v_full, turn):
        items_ref, (out_ref, lse_ref) = operands.items, out_refs
        (q_smem, out_smem), q_staging, p_smem = rows_smem
        q_full, q_free = q_barriers
        warpgroup = lax.axis_index("warpgroup")
        units = operands.num_items[0] * self.head_blocks
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
            fields = (items_ref[item, field] for field in range(items_ref.shape[1]))
            return Unit(item, lax.rem(of, self.head_blocks), *fields)

        @pl.when(warpgroup == COMPUTE_WARPGROUPS)
        def memory():
            plgpu.set_max_registers(40, action="decrease")
            memory = ExtendMemory(
                self.spec,
                self.sizes,
                self.copies,
                self.heads,
                self.tile_tokens,
                operands,
                q_staging,
                q_full,
                q_free,
                pages_smem,
                full,
                free,
                last_v_full,
            )
            memory.run(unit, rounds)

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def compute():
            plgpu.set_max_registers(232, action="increase")
            own = (None if ref is None else ref.at[warpgroup] for ref in (q_smem, q_staging, p_smem, out_smem))
            own_q, own_staging, own_p, own_out = own

            def attend_unit(round, carry):
                done, now = carry
                begun = now.begun(done)
                following = unit(round + 1)  # read long before it is needed
                skipped = warpgroup * self.tile_tokens
                tokens = jnp.clip(now.tokens - skipped, 0, self.tile_tokens)
                rows = TileRows.load(
                    operands,
                    now,
                    warpgroup,
                    self._kv_head,
                    spec=self.spec,
                    block_kv=self.sizes.block_kv,
                    tile_tokens=self.tile_tokens,
                    tokens=tokens,
                    limit=now.limit + skipped,
                )
                self._take_queries(own_staging, own_q, q_full.at[warpgroup], q_free.at[warpgroup], rows)
                pl.when(warpgroup == 1)(lambda: self._pass(turn))
                acc, top, total = self._attend(own_q, pages_smem, own_p, full, free, turn, now, rows, begun)
                pl.when(warpgroup == 0)(lambda: self._pass(turn))

                @pl.when(tokens > 0)
                def store_results():
                    empty = top == -jnp.inf
                    safe_total = jnp.where(empty, 1.0, total)
                    lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(safe_total)) / LOG2E)
                    lse_ref[now.item, now.heads, warpgroup] = lse
                    share = 1.0 / safe_total
                    if operands.out_factor is not None:
                        share = share * operands.out_factor[self._kv_head(now)]
                    out = (acc * lax.broadcast_in_dim(share, acc.shape, [0])).astype(self.dtype)
                    self._store_rows(out, out_ref, now.first + skipped, tokens, now.heads * self.heads, own_out)

                return begun + now.end_tile, following

            lax.fori_loop(0, rounds, attend_unit, (jnp.int32(0), unit(0)))
            plgpu.wait_smem_to_gmem(0)

    def _take_queries(self, staging, q_smem, q_full, q_free, rows):
        """Rows of a tile into the form that wgmma reads."""
        width = staging.shape[-1]
        for column in staged_pieces(self.spec.head_dim, width):
            plgpu.barrier_wait(q_full)
            q = plgpu.load(staging, layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.wait_smem_to_gmem(0)  # the last unit's output lies where q goes
            # Where only a scale makes logits of products, the largest is taken before it scales.
            q_smem[:, pl.ds(column, width)] = -q if rows.only_scaled and self.spec.scale < 0 else q
            plgpu.commit_smem()
            plgpu.barrier_arrive(q_free)

    def _store_rows(self, out, out_ref, first, tokens, head, staging):
        """The first `tokens` tokens of each head: those behind them belong to another block."""
        width = staging.shape[-1]
        for column in staged_pieces(self.spec.value_dim, width):
            part = lax.slice(out, (0, column), (WGMMA_ROWS, column + width)) if out.shape[1] > width else out
            if column:
                plgpu.wait_smem_to_gmem(0)
            staging[pl.ds(0, WGMMA_ROWS)] = part
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

    def _attend(self, q_smem, pages_smem, p_smem, full, free, turn, unit, rows, begun):
        """Unnormalised output, largest scaled score (base 2) and sum of each row."""
        (k_smem, v_smem), (k_full, v_full), (k_free, v_free) = pages_smem, full, free
        (k_stages, v_stages), block_kv = self.sizes.stages, self.sizes.block_kv
        factor = abs(self.spec.scale) * LOG2E
        only_scaled = rows.only_scaled
        per_row = plgpu.Layout.WGMMA.reduce(1)
        spans = rows.spans()

        def wait_for_k(tile, end):
            pl.when(tile < end)(lambda: plgpu.barrier_wait(k_full.at[lax.rem(begun + tile, k_stages)]))

        def attend_tile(tile, carry, masked):
            acc, top, total = carry
            k_stage, v_stage = lax.rem(begun + tile, k_stages), lax.rem(begun + tile, v_stages)
            mask = rows.mask_words(tile)

            def scores(ref):
                plgpu.wgmma(ref, q_smem, k_smem.at[k_stage].transpose((1, 0)))
                self._pass(turn)
                return ref[...]

            s = pl.run_scoped(scores, tiles.accumulator(WGMMA_ROWS, block_kv))
            plgpu.barrier_arrive(k_free.at[k_stage])
            if masked or not only_scaled:
                seen = rows.visible(tile, mask) if masked else None
                s = s * factor if only_scaled else rows.logits(s, tile)
                s = s if seen is None else jnp.where(seen, s, -jnp.inf)
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
            if self.spec.value_dim <= 128:
                total = total + p.sum(axis=1)
                acc, total, new_top, probabilities = lax.optimization_barrier((acc, total, new_top, probabilities))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_full.at[v_stage])
            plgpu.barrier_wait(turn)
            if self.spec.value_dim > 128:
                total = total + p.sum(axis=1)
            next_k = functools.partial(wait_for_k, tile + 1, spans[-1][1])
            acc = tiles.add_product(acc, probabilities, v_smem.at[v_stage], p_smem, meanwhile=next_k)
            plgpu.barrier_arrive(v_free.at[v_stage])
            return acc, new_top, total

        def skip_tile(tile):
            """Keeps the others' time: the memory and the other warpgroup still have this tile to do."""
            for filled, freed, stages in zip(full, free, self.sizes.stages, strict=True):
                stage = lax.rem(begun + tile, stages)
                plgpu.barrier_wait(filled.at[stage])
                plgpu.barrier_arrive(freed.at[stage])
                self._pass(turn)

        carry = (
            plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, self.spec.value_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((WGMMA_ROWS,), -jnp.inf, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((WGMMA_ROWS,), jnp.float32), per_row),
        )
        if spans[0][0] == "skip":
            pl.loop(*spans.pop(0)[1:])(skip_tile)
        wait_for_k(spans[0][1], spans[-1][1])
        for what, first, end in spans[:-1]:
            attend = functools.partial(attend_tile, masked=what == "masked")
            carry = lax.fori_loop(first, end, attend, carry)
        pl.loop(*spans[-1][1:])(skip_tile)
        return carry

    def _kv_head(self, unit):
        return unit.kv_head(self.spec, self.heads)

    def _pass(self, turn):
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)
