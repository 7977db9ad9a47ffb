"""Paged decode on Hopper: split-KV flash attention, by blocks that each have the same number of tiles to do.

grid (row blocks, kv heads, workers)       a worker: items of the schedule, each a part of a sequence, one after another
  memory warpgroup    TMA: q of an item, then k and v a tile of `block_kv` keys at a time, `stages` tiles ahead
  compute warpgroup   S^T = k q^T, online softmax in base 2 over the keys, acc^T += v^T P^T; then acc / sum and lse out
  q_full, q_free      memory -> compute, and back: an item's q has arrived; is no longer needed
  k_full, v_full      memory -> compute: the copies of a tile have arrived
  k_free, v_free      compute -> memory: the tile may be overwritten
shared memory: two items' q, `stages` tiles of k and of v, probabilities, the float32 result of an item

All blocks fit on the GPU at the same time, and the memory warpgroup goes on with the next item while the last one is
finished: the copies never wait for the start of a block. A sequence of one part is done here; those of several are left
for `combine`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jattn_kernels.mosaic.sm90 import tiles
from jattn_kernels.mosaic.sm90.tiles import SHARED_MEMORY_BYTES, WGMMA_ROWS, PageCopies
from jattn_kernels.schedule import DecodeSchedule
from jattn_kernels.spec import AttentionSpec

_LOG2E = math.log2(math.e)
_THREADS = 128


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """Sizes that the kernel is compiled for.

    Attributes:
        block_rows: Query rows of a block: tokens times group, a multiple of 8.
        block_kv: Keys a tile.
        stages: Tiles in shared memory.
        blocks_per_sm: Blocks that fit on an SM at the same time.
    """

    block_rows: int
    block_kv: int
    stages: int
    blocks_per_sm: int

    def shared_memory_bytes(self, spec: AttentionSpec, itemsize: int) -> int:
        """Bytes of one block."""
        keys = self.stages * self.block_kv * (spec.head_dim + spec.value_dim)
        rows = self.block_rows * (2 * spec.head_dim + self.block_kv)
        results = 4 * self.block_rows * (spec.value_dim + 1)
        return itemsize * (keys + rows) + results + tiles.RESERVED_BYTES


def choose_tiles(spec: AttentionSpec, itemsize: int, num_tokens: int) -> DecodeTiles:
    """As many stages of 64 keys as let two blocks share an SM, or else one block have it."""
    rows = num_tokens * spec.group_size
    block_rows = min(rows + -rows % tiles.TILED_ROWS, WGMMA_ROWS)
    for blocks_per_sm in (2, 1):
        for stages in (4, 3, 2):
            sizes = DecodeTiles(block_rows, 64, stages, blocks_per_sm)
            if sizes.shared_memory_bytes(spec, itemsize) * blocks_per_sm <= SHARED_MEMORY_BYTES:
                return sizes
    raise AssertionError(f"no tiles fit {spec}")


class Parts(NamedTuple):
    """What decode leaves behind: sequences that are done, and parts of the others, each normalised on its own.

    Attributes:
        out: Of sequences of one part; whatever memory held, elsewhere.
        lse: Natural log; -inf where nothing is seen.
        part_outs: Of the parts of the other sequences.
        part_lses: Natural log.
    """

    out: Float[Array, "B K rows Hv"]
    lse: Float[Array, "B K rows"]
    part_outs: Float[Array, "W K R Hv"]
    part_lses: Float[Array, "W K R"]


class _Item(NamedTuple):
    sequence: Any
    first: Any
    end: Any
    parts: Any
    kv_len: Any
    limit: Any


@dataclasses.dataclass(frozen=True)
class DecodeKernel:
    """The kernel of one configuration.

    Attributes:
        num_tokens: Query tokens a sequence, `group_size` rows each.
        row_blocks: Blocks of rows of a head.
        heads_a_block: Heads that share one block of 8 rows; each computes all of it.
        dtype: Of queries, keys, values and output.
    """

    spec: AttentionSpec
    sizes: DecodeTiles
    page_size: int
    num_tokens: int
    row_blocks: int
    heads_a_block: int
    dtype: Any

    @property
    def rows(self) -> int:
        """Rows that a block of one head has of its own."""
        return self.sizes.block_rows // self.heads_a_block

    @property
    def copies(self) -> PageCopies:
        return PageCopies(self.sizes.block_kv, self.page_size, self.spec.page_layout)

    def __call__(
        self,
        q: Float[Array, "B rows H"],
        k_pages: Float[Array, "..."],
        v_pages: Float[Array, "..."],
        page_table: Int[Array, "B max_pages"],
        seq_lens: Int[Array, " B"],
        first_limit: Int[Array, " B"],
        schedule: DecodeSchedule,
        layer: Int[Array, "1"],
    ) -> Parts:
        """Attention of all items.

        Args:
            q: The rows of one kv head after another, each token by token. A head's rows fill whole blocks of rows, or
                several heads share one block.
            k_pages, v_pages: With a leading layer axis.
            first_limit: How many keys the first token sees by the causal rule; each next one sees one more.
            layer: Which layer of the pages.
        """
        assert schedule.block_kv == self.sizes.block_kv
        heads, value_dim = self.spec.num_kv_heads, self.spec.value_dim
        shape = (q.shape[0], heads, self.row_blocks * self.rows)
        part_shape = (schedule.items.shape[0], heads, self.row_blocks * self.sizes.block_rows)
        run: Any = plgpu.kernel(
            self._entry,
            out_type=[
                jax.ShapeDtypeStruct((*shape, value_dim), self.dtype),
                jax.ShapeDtypeStruct(shape, jnp.float32),
                jax.ShapeDtypeStruct((*part_shape, value_dim), jnp.float32),
                jax.ShapeDtypeStruct(part_shape, jnp.float32),
            ],
            grid=(self.row_blocks, heads, schedule.starts.shape[0] - 1),
            grid_names=("rows", "head", "worker"),
            num_threads=2,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=tiles.interpret_params(),
        )
        return Parts(
            *run(q, k_pages, v_pages, page_table, seq_lens, first_limit, schedule.items, schedule.starts, layer)
        )

    def _entry(self, *refs):
        spec, sizes = self.spec, self.sizes
        filled = plgpu.Barrier(num_arrivals=self.copies.copies, num_barriers=sizes.stages)
        freed = plgpu.Barrier(num_barriers=sizes.stages)
        pl.run_scoped(
            lambda *scratch: self._body(refs, *scratch),
            tiles.tile((2, sizes.block_rows, spec.head_dim), self.dtype),
            (
                tiles.tile((sizes.stages, sizes.block_kv, spec.head_dim), self.dtype),
                tiles.tile((sizes.stages, sizes.block_kv, spec.value_dim), self.dtype),
            ),
            tiles.tile((sizes.block_rows, sizes.block_kv), self.dtype),
            (
                plgpu.SMEM((sizes.block_rows, spec.value_dim), jnp.float32),
                plgpu.SMEM((sizes.block_rows,), jnp.float32),
            ),
            (plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_barriers=2)),
            (filled, filled),
            (freed, freed),
            collective_axes="warpgroup",
        )

    def _body(self, refs, q_smem, pages_smem, p_smem, result_smem, q_barriers, full, free):
        q_ref, k_ref, v_ref, table_ref, lens_ref, limit_ref, items_ref, starts_ref, layer_ref, *out_refs = refs
        q_full, q_free = q_barriers
        head, worker = lax.axis_index("head"), lax.axis_index("worker")
        begin, end = starts_ref[worker], starts_ref[worker + 1]
        first_item = jnp.minimum(begin, items_ref.shape[0] - 1)

        def walk(visit, state):
            """Calls `visit(number, item, next item, state) -> state` for each item, its fields read an item ahead.

            They come from memory, the lengths after the sequence's number: nobody shall wait for them.
            """

            def fields(number):
                number = jnp.minimum(number, items_ref.shape[0] - 1)
                return tuple(items_ref[number, field] for field in range(4))

            def whole(fields):
                return _Item(*fields, lens_ref[fields[0]], limit_ref[fields[0]])

            def step(number, carry):
                now, ahead, state = carry
                following, further = whole(ahead), fields(number + 2)
                return following, further, visit(number, now, following, state)

            return lax.fori_loop(begin, end, step, (whole(fields(begin)), fields(begin + 1), state))[2]

        @pl.when(lax.axis_index("warpgroup") == 1)
        def memory():
            layer = layer_ref[0]
            block = lax.div(head, self.heads_a_block) * self.row_blocks + lax.axis_index("rows")
            rows = pl.ds(block * self.sizes.block_rows, self.sizes.block_rows)

            def load_item(number, now, following, state):
                slot = lax.rem(number - begin, 2)
                pl.when(number - begin >= 2)(lambda: plgpu.barrier_wait(q_free.at[slot]))
                plgpu.copy_gmem_to_smem(q_ref.at[now.sequence, rows], q_smem.at[slot], q_full.at[slot])
                return self._load_pages(
                    (k_ref, v_ref), table_ref, now, following, (layer, head), pages_smem, full, free, state
                )

            begin_sequence, begin_tile = items_ref[first_item, 0], items_ref[first_item, 1]
            first_pages = self._pages(table_ref, begin_sequence, begin_tile, lens_ref[begin_sequence])
            done, _ = walk(load_item, (jnp.int32(0), first_pages))

            @pl.loop(jnp.maximum(begin, end - 2), end)
            def wait_for_the_last_queries(number):
                plgpu.barrier_wait(q_free.at[lax.rem(number - begin, 2)])

            @pl.loop(jnp.maximum(done, self.sizes.stages), done + self.sizes.stages)
            def wait_for_the_last_tiles(step):
                for freed in free:
                    plgpu.barrier_wait(freed.at[lax.rem(step, self.sizes.stages)])

        @pl.when(lax.axis_index("warpgroup") == 0)
        def compute():
            def attend_item(number, now, following, done):
                slot = lax.rem(number - begin, 2)
                plgpu.barrier_wait(q_full.at[slot])
                acc, top, total = self._attend(q_smem.at[slot], pages_smem, p_smem, full, free, now, done)
                plgpu.barrier_arrive(q_free.at[slot])
                self._store(acc, top, total, result_smem, out_refs, now, number)
                return done + now.end - now.first

            walk(attend_item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    def _pages(self, table_ref, sequence, tile, kv_len):
        return self.copies.pages(table_ref, sequence, tile, jnp.maximum(kv_len - 1, 0))

    def _load_pages(self, pages_refs, table_ref, item, following, place, pages_smem, full, free, state):
        """An item's tiles of k and v in turn; page numbers come from memory too, so they are asked for a tile ahead."""
        stages = self.sizes.stages
        begun, pages = state

        def load_tile(tile, pages):
            is_last = tile + 1 == item.end
            sequence = jnp.where(is_last, following.sequence, item.sequence)
            kv_len = jnp.where(is_last, following.kv_len, item.kv_len)
            next_pages = self._pages(table_ref, sequence, jnp.where(is_last, following.first, tile + 1), kv_len)
            step = begun + tile - item.first
            stage = lax.rem(step, stages)
            for pages_ref, smem, filled, freed in zip(pages_refs, pages_smem, full, free, strict=True):
                pl.when(step >= stages)(lambda freed=freed: plgpu.barrier_wait(freed.at[stage]))
                self.copies.start(pages_ref, *place, pages, tile, smem.at[stage], filled.at[stage])
            return next_pages

        def skip_item(_, pages):
            return self._pages(table_ref, following.sequence, following.first, following.kv_len)

        pages = lax.fori_loop(item.first, item.end, load_tile, pages)
        pages = lax.fori_loop(0, jnp.where(item.first < item.end, 0, 1), skip_item, pages)
        return begun + item.end - item.first, pages

    def _attend(self, q_smem, pages_smem, p_smem, full, free, item, done):
        """Unnormalised output [Hv, rows], largest scaled score (base 2) and sum of each row."""
        spec, block_rows, block_kv, stages = self.spec, self.sizes.block_rows, self.sizes.block_kv, self.sizes.stages
        (k_smem, v_smem), (k_full, v_full), (k_free, v_free) = pages_smem, full, free

        def attend_tile(tile, carry):
            acc, top, total = carry
            stage = lax.rem(done + tile - item.first, stages)
            key = tile * block_kv

            def scores(ref):
                plgpu.wgmma(ref, k_smem.at[stage], q_smem.transpose((1, 0)))
                return ref[...]

            plgpu.barrier_wait(k_full.at[stage])
            s = pl.run_scoped(scores, tiles.accumulator(block_kv, block_rows))
            plgpu.barrier_arrive(k_free.at[stage])
            s = jnp.where(self._visible(item.kv_len - key, item.limit - key), s * (spec.scale * _LOG2E), -jnp.inf)

            new_top = jnp.maximum(top, s.max(axis=0))
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            p = jnp.exp2(s - lax.broadcast_in_dim(shift, s.shape, [1]))
            keep = jnp.exp2(top - shift)
            p_smem.transpose((1, 0))[...] = p.astype(self.dtype)
            plgpu.commit_smem()
            acc = acc * lax.broadcast_in_dim(keep, acc.shape, [1])
            total = total * lax.broadcast_in_dim(keep, p.shape, [1]) + p  # summed over the keys in the end
            plgpu.barrier_wait(v_full.at[stage])
            keys_left = item.kv_len - key
            pl.when(keys_left < block_kv)(lambda: tiles.zero_rows_from(v_smem.at[stage], keys_left))
            acc = tiles.accumulate(acc, v_smem.at[stage].transpose((1, 0)), p_smem.transpose((1, 0)))
            plgpu.barrier_arrive(v_free.at[stage])
            return acc, new_top, total

        per_row = plgpu.Layout.WGMMA.reduce(0)
        start = (
            plgpu.layout_cast(jnp.zeros((spec.value_dim, block_rows), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((block_rows,), -jnp.inf, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((block_kv, block_rows), jnp.float32), plgpu.Layout.WGMMA),
        )
        acc, top, total = lax.fori_loop(item.first, item.end, attend_tile, start)
        return acc, top, total.sum(axis=0)

    def _visible(self, keys_left, limit):
        """Which keys of a tile each row sees: those of the sequence, and by the causal rule those up to its own."""
        shape = (self.sizes.block_kv, self.sizes.block_rows)
        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        if not self.spec.causal:
            return key < keys_left
        if self.num_tokens == 1:
            return key < jnp.minimum(keys_left, limit)
        first_row = lax.axis_index("rows") * self.sizes.block_rows
        row = first_row + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        return (key < keys_left) & (key < limit + row // self.spec.group_size)

    def _store(self, acc, top, total, result_smem, out_refs, item, number):
        """The result of an item: where the sequence's lies, or among the parts."""
        out_ref, lse_ref, part_outs_ref, part_lses_ref = out_refs
        out_smem, lse_smem = result_smem
        head, row_block = lax.axis_index("head"), lax.axis_index("rows")
        empty = top == -jnp.inf
        safe_total = jnp.where(empty, 1.0, total)
        out = acc / lax.broadcast_in_dim(safe_total, acc.shape, [1])
        plgpu.wait_smem_to_gmem(0)  # the last item's
        out_smem.transpose((1, 0))[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        lse_smem[...] = jnp.where(empty, -jnp.inf, (top + jnp.log2(safe_total)) / _LOG2E)
        plgpu.commit_smem()

        @pl.when(item.parts > 1)
        def store_part():
            rows = pl.ds(row_block * self.sizes.block_rows, self.sizes.block_rows)
            plgpu.copy_smem_to_gmem(out_smem, part_outs_ref.at[number, head, rows])
            plgpu.copy_smem_to_gmem(lse_smem, part_lses_ref.at[number, head, rows])

        @pl.when(item.parts == 1)
        def store_sequence():
            own = lax.rem(head, self.heads_a_block) * self.rows
            shape = (self.rows, self.spec.value_dim)
            layout = plgpu.Layout.WG_STRIDED(shape, vec_size=math.gcd(math.prod(shape) // _THREADS, 8))
            result = plgpu.load(out_smem.at[pl.ds(own, self.rows)], layout=layout, optimized=False)
            out_ref[item.sequence, head, pl.ds(row_block * self.rows, self.rows)] = result.astype(self.dtype)
            for row in range(self.rows):
                lse_ref[item.sequence, head, row_block * self.rows + row] = lse_smem[own + row]
