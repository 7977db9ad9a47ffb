"""Paged extend on Hopper: ragged queries over pages, two compute warpgroups that take turns at the tensor core.

grid (items, head blocks)                  an item: up to `block_tokens` tokens of one request, the longest first
  memory warpgroup    TMA: k and v a tile of `block_kv` keys at a time, `stages` tiles ahead
  compute warpgroups  64 rows each: S = q k^T, online softmax in base 2, acc += P v; then acc / sum and lse out
  k_full, v_full      memory -> compute: the copies of a tile have arrived, and hold nothing past the last key
  k_free, v_free      both compute -> memory: the tile may be overwritten
  turn                compute <-> compute: while one multiplies, the other does its softmax
shared memory: q of both, a staging buffer for each, `stages` tiles of k and of v

A tile's 64 rows are some heads of one group times as many tokens as fit, head by head: so a prompt reads its prefix
once a kv head even if it has only a few tokens, and the warpgroups of a long one see nearly the same keys. Requests
begin at any token, while wgmma's tiles are made of 8 rows: queries and results pass through untiled staging memory,
where any row may begin, rather than through copies in XLA, which would read and write all of q and out once more.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jattn_kernels.call import AttentionOptions
from jattn_kernels.mosaic.sm90 import tiles
from jattn_kernels.mosaic.sm90.extend_schedule import (
    COMPUTE_WARPGROUPS,
    STAGED_COLUMNS,
    ExtendSchedule,
    ExtendTiles,
    choose_tiles,
    extend_schedule,
    heads_per_tile,
)
from jattn_kernels.mosaic.sm90.paged import stacked
from jattn_kernels.mosaic.sm90.tiles import WGMMA_ROWS, PageCopies
from jattn_kernels.spec import AttentionSpec

_LOG2E = math.log2(math.e)


def paged_extend(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    options: AttentionOptions,
    *,
    spec: AttentionSpec,
    page_size: int,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Output and lse of ragged queries over paged keys."""
    layer, k_pages, v_pages = stacked(k_pages, v_pages, options.layer_index)
    sizes = choose_tiles(spec)
    schedule = options.schedule
    if schedule is None:
        q_start, kv_start = options.starts(seq_lens, jnp.diff(cu_q_lens))
        limit = q_start - kv_start + 1
        schedule = extend_schedule(seq_lens, cu_q_lens, limit, spec=spec, num_tokens=q.shape[0], sizes=sizes)
    return extend(
        q, k_pages, v_pages, page_table, seq_lens, schedule, layer, spec=spec, sizes=sizes, page_size=page_size
    )


def make_schedule(
    seq_lens: Int[Array, " B"],
    cu_q_lens: Int[Array, " B_plus_1"],
    *,
    spec: AttentionSpec,
    num_tokens: int,
    itemsize: int,
) -> ExtendSchedule:
    """The work list of queries at the ends of their sequences.

    Args:
        num_tokens: Rows of q, padded tokens included.
    """
    limit = seq_lens - jnp.diff(cu_q_lens) + 1
    return extend_schedule(seq_lens, cu_q_lens, limit, spec=spec, num_tokens=num_tokens, sizes=choose_tiles(spec))


def extend(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."],
    page_table: Int[Array, "B max_pages"],
    seq_lens: Int[Array, " B"],
    schedule: ExtendSchedule,
    layer: Int[Array, "1"],
    *,
    spec: AttentionSpec,
    sizes: ExtendTiles,
    page_size: int,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Output and natural-log lse of every token; 0 and -inf where it sees nothing, and for padded tokens.

    Args:
        k_pages, v_pages: With a leading layer axis.
        layer: Which layer of the pages.

    Raises:
        NotImplementedError: The kernel cannot be compiled for `sizes`.
    """
    if (reason := sizes.refuses(spec, q.dtype.itemsize, page_size)) is not None:
        raise NotImplementedError(reason)
    assert schedule.block_kv == sizes.block_kv
    heads = heads_per_tile(spec.group_size)
    block_tokens = schedule.block_tokens
    tile_tokens = block_tokens // COMPUTE_WARPGROUPS
    num_tokens, num_heads, _ = q.shape
    # A copy may pass the end of an array, but may not be larger than it.
    missing = max(0, tile_tokens - num_tokens)
    if missing:
        q = jnp.pad(q, ((0, missing), (0, 0), (0, 0)))
    kernel = _ExtendKernel(spec, sizes, page_size, heads, tile_tokens, q.dtype)
    out, lse = kernel(q, k_pages, v_pages, page_table, seq_lens, schedule.items, layer)
    lse = lse[..., : heads * tile_tokens].reshape(*lse.shape[:3], heads, tile_tokens)
    lse = lse.transpose(0, 2, 4, 1, 3).reshape(-1, num_heads)
    return out[:num_tokens], lse[schedule.place]


@dataclasses.dataclass(frozen=True)
class _ExtendKernel:
    """The kernel of one configuration.

    Attributes:
        heads: Heads that share a tile's rows.
        tile_tokens: Tokens of a tile, each of them one row of each head.
    """

    spec: AttentionSpec
    sizes: ExtendTiles
    page_size: int
    heads: int
    tile_tokens: int
    dtype: Any

    @property
    def copies(self) -> PageCopies:
        return PageCopies(self.sizes.block_kv, self.page_size, self.spec.page_layout)

    def __call__(self, q, k_pages, v_pages, page_table, seq_lens, items, layer):
        head_blocks = q.shape[1] // self.heads
        run: Any = plgpu.kernel(
            self._entry,
            out_type=[
                jax.ShapeDtypeStruct((*q.shape[:2], self.spec.value_dim), self.dtype),
                jax.ShapeDtypeStruct((items.shape[0], head_blocks, COMPUTE_WARPGROUPS, WGMMA_ROWS), jnp.float32),
            ],
            grid=(items.shape[0], head_blocks),  # the last axis runs fastest: items in their order
            grid_names=("item", "heads"),
            num_threads=COMPUTE_WARPGROUPS + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=tiles.interpret_params(),
        )
        return run(q, k_pages, v_pages, page_table, seq_lens, items, layer)

    def _entry(self, *refs):
        spec, sizes, dtype = self.spec, self.sizes, self.dtype
        staged = min(max(spec.head_dim, spec.value_dim), STAGED_COLUMNS)
        filled = plgpu.Barrier(num_arrivals=self.copies.copies, num_barriers=sizes.stages)
        freed = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=sizes.stages)
        pl.run_scoped(
            lambda *scratch: self._body(*refs, *scratch),
            (
                tiles.tile((COMPUTE_WARPGROUPS, WGMMA_ROWS, spec.head_dim), dtype),
                plgpu.SMEM((COMPUTE_WARPGROUPS, WGMMA_ROWS, staged), dtype),
                tiles.probabilities_tile((COMPUTE_WARPGROUPS, WGMMA_ROWS, sizes.block_kv), dtype),
            ),
            (
                tiles.tile((sizes.stages, sizes.block_kv, spec.head_dim), dtype),
                tiles.tile((sizes.stages, sizes.block_kv, spec.value_dim), dtype),
            ),
            plgpu.Barrier(num_arrivals=self.heads, num_barriers=COMPUTE_WARPGROUPS),
            (filled, filled),
            (freed, freed),
            plgpu.Barrier(num_arrivals=self.copies.copies),
            plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
            collective_axes="warpgroup",
        )

    def _body(self, q_ref, k_ref, v_ref, table_ref, lens_ref, items_ref, layer_ref, out_ref, lse_ref, *scratch):
        rows_smem, pages_smem, q_full, full, free, last_v_full, turn = scratch
        item, block = lax.axis_index("item"), lax.axis_index("heads")
        warpgroup = lax.axis_index("warpgroup")
        sequence, first, tokens, key_tiles, limit = (items_ref[item, field] for field in range(5))
        kv_len = lens_ref[sequence]

        @pl.when(warpgroup == COMPUTE_WARPGROUPS)
        def memory():
            plgpu.set_max_registers(40, action="decrease")
            head = lax.div(block, self.spec.group_size // self.heads)
            source = (table_ref, sequence, key_tiles, kv_len, layer_ref[0], head)
            self._load_pages((k_ref, v_ref), source, pages_smem, full, free, last_v_full)

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def compute():
            plgpu.set_max_registers(232, action="increase")
            skipped = warpgroup * self.tile_tokens
            mine = jnp.clip(tokens - skipped, 0, self.tile_tokens)
            head = block * self.heads
            q_smem, staging, p_smem = (None if ref is None else ref.at[warpgroup] for ref in rows_smem)

            @pl.when(mine > 0)
            def load_queries():
                self._load_queries(q_ref, first + skipped, head, staging, q_smem, q_full.at[warpgroup])

            pl.when(warpgroup == 1)(lambda: self._pass(turn))
            acc, top, total = self._attend(
                q_smem, pages_smem, p_smem, full, free, turn, mine, key_tiles, kv_len, limit + skipped
            )
            pl.when(warpgroup == 0)(lambda: self._pass(turn))

            @pl.when(mine > 0)
            def store_results():
                empty = top == -jnp.inf
                safe_total = jnp.where(empty, 1.0, total)
                lse_ref[item, block, warpgroup] = jnp.where(empty, -jnp.inf, (top + jnp.log2(safe_total)) / _LOG2E)
                out = acc * lax.broadcast_in_dim(1.0 / safe_total, acc.shape, [0])
                self._store_rows(out.astype(self.dtype), out_ref, first + skipped, mine, head, staging)

    def _load_pages(self, pages_refs, source, pages_smem, full, free, last_v_full):
        """Tiles of k and v in turn; what lies past the last key is cleared from v."""
        (k_ref, v_ref), (k_smem, v_smem), (k_full, v_full), (k_free, v_free) = pages_refs, pages_smem, full, free
        table_ref, sequence, key_tiles, kv_len, layer, head = source
        stages, block_kv, copies = self.sizes.stages, self.sizes.block_kv, self.copies
        # Only the sequence's last tile can be partly filled.
        whole = jnp.minimum(key_tiles, lax.div(kv_len, block_kv))

        @pl.loop(0, key_tiles)
        def load_tile(step):
            stage = lax.rem(step, stages)
            sources = copies.sources(table_ref, sequence, step, kv_len - 1)
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(k_free.at[stage]))
            copies.start(k_ref, layer, head, sources, k_smem.at[stage], k_full.at[stage])
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(v_free.at[stage]))

            @pl.when(step < whole)
            def whole_tile():
                copies.start(v_ref, layer, head, sources, v_smem.at[stage], v_full.at[stage])

            @pl.when(step >= whole)
            def last_tile():
                copies.start(v_ref, layer, head, sources, v_smem.at[stage], last_v_full)
                plgpu.barrier_wait(last_v_full)
                for row in range(0, block_kv, 64):
                    for column in range(0, self.spec.value_dim, 64):  # few registers: 64 x 64 at a time
                        part = v_smem.at[stage, pl.ds(row, 64), pl.ds(column, 64)]
                        tiles.zero_rows_from(part, kv_len - step * block_kv - row)
                for _ in range(copies.copies):
                    plgpu.barrier_arrive(v_full.at[stage])

        @pl.loop(jnp.maximum(key_tiles, stages), key_tiles + stages)
        def wait_for_the_last(step):
            for freed in (k_free, v_free):
                plgpu.barrier_wait(freed.at[lax.rem(step, stages)])

    def _load_queries(self, q_ref, first, head, staging, q_smem, q_full):
        """Rows of a tile, head by head, into the form that wgmma reads."""
        width = staging.shape[-1]
        for column in range(0, self.spec.head_dim, width):

            @pl.loop(0, self.heads)
            def load_head(h, column=column):
                rows = pl.ds(h * self.tile_tokens, self.tile_tokens)
                source = q_ref.at[pl.ds(first, self.tile_tokens), head + h, pl.ds(column, width)]
                plgpu.copy_gmem_to_smem(source, staging.at[rows], q_full)

            plgpu.barrier_wait(q_full)
            q = plgpu.load(staging, layout=plgpu.Layout.WGMMA, optimized=False)
            # The softmax below takes the largest score before it scales.
            q_smem[:, pl.ds(column, width)] = -q if self.spec.scale < 0 else q
            plgpu.commit_smem()

    def _store_rows(self, out, out_ref, first, tokens, head, staging):
        """The first `tokens` tokens of each head: those behind them belong to another block."""
        width = staging.shape[-1]
        for column in range(0, self.spec.value_dim, width):
            part = lax.slice(out, (0, column), (WGMMA_ROWS, column + width)) if out.shape[1] > width else out
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

            plgpu.wait_smem_to_gmem(0)

    def _attend(self, q_smem, pages_smem, p_smem, full, free, turn, tokens, key_tiles, kv_len, limit):
        """Unnormalised output, largest scaled score (base 2) and sum of each row."""
        (k_smem, v_smem), (k_full, v_full), (k_free, v_free) = pages_smem, full, free
        stages, block_kv = self.sizes.stages, self.sizes.block_kv
        factor = abs(self.spec.scale) * _LOG2E
        per_row = plgpu.Layout.WGMMA.reduce(1)
        # Keys that the tile's first and last token see.
        least = jnp.clip(limit, 0, kv_len) if self.spec.causal else kv_len
        most = jnp.clip(limit + tokens - 1, 0, kv_len) if self.spec.causal else kv_len
        steps = jnp.where(tokens > 0, jnp.minimum(pl.cdiv(most, block_kv), key_tiles), 0)
        unmasked = jnp.minimum(lax.div(least, block_kv), steps)

        def attend_tile(step, carry, masked):
            acc, top, total = carry
            stage = lax.rem(step, stages)

            def scores(ref):
                plgpu.wgmma(ref, q_smem, k_smem.at[stage].transpose((1, 0)))
                self._pass(turn)
                return ref[...]

            plgpu.barrier_wait(k_full.at[stage])
            s = pl.run_scoped(scores, tiles.accumulator(WGMMA_ROWS, block_kv))
            plgpu.barrier_arrive(k_free.at[stage])
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
            plgpu.barrier_wait(v_full.at[stage])
            plgpu.barrier_wait(turn)
            if self.spec.head_dim > 128:
                total = total + p.sum(axis=1)
            acc = tiles.add_product(acc, probabilities, v_smem.at[stage], p_smem)
            plgpu.barrier_arrive(v_free.at[stage])
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
            stage = lax.rem(step, stages)
            for filled, freed in ((k_full, k_free), (v_full, v_free)):
                plgpu.barrier_wait(filled.at[stage])
                plgpu.barrier_arrive(freed.at[stage])
                self._pass(turn)

        carry = (
            plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, self.spec.value_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((WGMMA_ROWS,), -jnp.inf, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((WGMMA_ROWS,), jnp.float32), per_row),
        )
        carry = lax.fori_loop(0, unmasked, lambda step, carry: attend_tile(step, carry, masked=False), carry)
        carry = lax.fori_loop(unmasked, steps, lambda step, carry: attend_tile(step, carry, masked=True), carry)
        pl.loop(steps, key_tiles)(skip_tile)
        return carry

    def _pass(self, turn):
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)
