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
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jattn_kernels.mosaic.sm90 import tiles
from jattn_kernels.mosaic.sm90.decode_tiles import DecodeTiles, value_columns
from jattn_kernels.mosaic.sm90.logits import LOG2E, base2_logits
from jattn_kernels.mosaic.sm90.readied import Readied, Turn, turn_keys, turn_queries_back, widen
from jattn_kernels.mosaic.sm90.tiles import PageCopies, PoolPlace
from jattn_kernels.schedule import DecodeSchedule
from jattn_kernels.spec import AttentionSpec

_THREADS = 128


class Operands(NamedTuple):
    """What the kernel reads; None where a call has no use for it.

    Attributes:
        q: The rows of one kv head after another, each token by token. A head's rows fill whole blocks of rows, or
            several heads share one block.
        k_pages, v_pages: With a leading layer axis; the same array twice if it holds both.
        layer: Which layer of the pages.
        items, starts: Of the schedule.
        first, end, position: Bounds of the keys that queries see, and their own numbers: of each sequence if it has
            one token, of each row of a head if several. Of one token, `end` is in the schedule.
        slopes: ALiBi's, of each row of all heads.
        logit_factor: Of the products of a sequence (or of all) and a head.
        out_factor: Of a head's output.
        mask: For each key of a sequence a bit for each token that sees it.
        tile_turns: Of a rotary embedding the angles' cosine and sine for the first key of each tile. The queries are
            then turned by their own numbers, float32, and [B, blocks of rows, H, rows].
        key_turns: The same for each key of any tile, by its number there.
    """

    q: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    layer: Any
    items: Any
    starts: Any
    first: Any = None
    end: Any = None
    position: Any = None
    slopes: Any = None
    logit_factor: Any = None
    out_factor: Any = None
    mask: Any = None
    tile_turns: Any = None
    key_turns: Any = None


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
    end_key: Any


class _Rows(NamedTuple):
    """What is known of an item's rows: bounds, scalars if of one token, vectors if of several, or None; and queries."""

    first: Any
    end: Any
    position: Any
    queries: Any


@dataclasses.dataclass(frozen=True)
class DecodeKernel:
    """The kernel of one configuration.

    Attributes:
        num_tokens: Query tokens a sequence, `group_size` rows each.
        row_blocks: Blocks of rows of a head.
        heads_a_block: Heads that share one block of 8 rows; each computes all of it.
        dtype: Of queries, of keys and values unless they are fp8, and of the probabilities.
        kv_dtype: Of keys and values.
        out_dtype: Of the output.
    """

    spec: AttentionSpec
    sizes: DecodeTiles
    page_size: int
    num_tokens: int
    row_blocks: int
    heads_a_block: int
    dtype: Any
    kv_dtype: Any
    out_dtype: Any

    @property
    def rows(self) -> int:
        """Rows that a block of one head has of its own."""
        return self.sizes.block_rows // self.heads_a_block

    @property
    def widens(self) -> bool:
        """Whether tiles of keys and values are widened before their products."""
        return jnp.dtype(self.kv_dtype) != jnp.dtype(self.dtype)

    @property
    def turns(self) -> bool:
        """Whether queries and keys are turned before their product."""
        return self.spec.rope_theta is not None

    @property
    def readies_keys(self) -> bool:
        return self.widens or self.turns

    @property
    def copies(self) -> PageCopies:
        is_wider = value_columns(self.spec) > self.spec.value_dim
        return PageCopies.of(self.spec, self.sizes.block_kv, self.page_size, tiles.TILED_ROWS if is_wider else None)

    def __call__(self, operands: Operands, schedule: DecodeSchedule) -> Parts:
        """Attention of all items."""
        assert schedule.block_kv == self.sizes.block_kv
        heads, width = self.spec.num_kv_heads, value_columns(self.spec)
        shape = (operands.q.shape[0], heads, self.row_blocks * self.rows)
        part_shape = (schedule.items.shape[0], heads, self.row_blocks * self.sizes.block_rows)
        leaves, tree = jax.tree.flatten(operands)
        run: Any = plgpu.kernel(
            functools.partial(self._entry, tree),
            out_type=[
                jax.ShapeDtypeStruct((*shape, width), self.out_dtype),
                jax.ShapeDtypeStruct(shape, jnp.float32),
                jax.ShapeDtypeStruct((*part_shape, width), jnp.float32),
                jax.ShapeDtypeStruct(part_shape, jnp.float32),
            ],
            grid=(self.row_blocks, heads, schedule.starts.shape[0] - 1),
            grid_names=("rows", "head", "worker"),
            num_threads=2,
            thread_name="warpgroup",
            kernel_name="paged_decode",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=tiles.interpret_params(),
        )
        return Parts(*run(*leaves))

    def _entry(self, tree, *refs):
        spec, sizes, width = self.spec, self.sizes, value_columns(self.spec)
        operands, out_refs = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves :]
        filled = plgpu.Barrier(num_arrivals=self.copies.copies, num_barriers=sizes.stages)
        freed = plgpu.Barrier(num_barriers=sizes.stages)
        q_shape = (2, sizes.block_rows, spec.head_dim)
        pl.run_scoped(
            lambda *scratch: self._body(operands, out_refs, *scratch),
            plgpu.SMEM((2, *q_shape[:0:-1]), jnp.float32) if self.turns else tiles.tile(q_shape, self.dtype),
            (
                tiles.tile((sizes.stages, sizes.block_kv, spec.head_dim), self.kv_dtype),
                tiles.tile((sizes.stages, sizes.block_kv, width), self.kv_dtype, copied_columns=spec.value_dim),
            ),
            Readied(
                tiles.tile(q_shape[1:], self.dtype) if self.turns else None,
                tiles.tile((sizes.block_kv, spec.head_dim), self.dtype) if self.readies_keys else None,
                tiles.tile((sizes.block_kv, width), self.dtype) if self.widens else None,
            ),
            tiles.tile((sizes.block_rows, sizes.block_kv), self.dtype, copied_columns=spec.value_dim),
            (plgpu.SMEM((sizes.block_rows, width), jnp.float32), plgpu.SMEM((sizes.block_rows,), jnp.float32)),
            (plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_barriers=2)),
            (filled, filled),
            (freed, freed),
            collective_axes="warpgroup",
        )

    def _body(self, operands, out_refs, q_smem, pages_smem, readied, p_smem, result_smem, q_barriers, full, free):
        q_full, q_free = q_barriers
        items_ref, starts_ref = operands.items, operands.starts
        head, worker = lax.axis_index("head"), lax.axis_index("worker")
        begin, end = starts_ref[worker], starts_ref[worker + 1]
        last_item = items_ref.shape[0] - 1

        def item(number):
            number = jnp.minimum(number, last_item)
            return _Item(*(items_ref[number, field] for field in range(5)))

        def walk(visit, state):
            """Calls `visit(number, item, next item, state) -> state` for each item, which is read an item ahead."""

            def step(number, carry):
                now, state = carry
                following = item(number + 1)
                return following, visit(number, now, following, state)

            return lax.fori_loop(begin, end, step, (item(begin), state))[1]

        @pl.when(lax.axis_index("warpgroup") == 1)
        def memory():
            layer = operands.layer[0]
            block = lax.div(head, self.heads_a_block) * self.row_blocks + lax.axis_index("rows")
            rows = block if self.turns else pl.ds(block * self.sizes.block_rows, self.sizes.block_rows)

            def load_item(number, now, following, state):
                slot = lax.rem(number - begin, 2)
                pl.when(number - begin >= 2)(lambda: plgpu.barrier_wait(q_free.at[slot]))
                plgpu.copy_gmem_to_smem(operands.q.at[now.sequence, rows], q_smem.at[slot], q_full.at[slot])
                return self._load_pages(operands, now, following, (layer, head), pages_smem, full, free, state)

            first_item = item(begin)
            done, _ = walk(load_item, (jnp.int32(0), self._pages(operands, first_item, first_item.first)))

            @pl.loop(jnp.maximum(begin, end - 2), end)
            def wait_for_the_last_queries(number):
                plgpu.barrier_wait(q_free.at[lax.rem(number - begin, 2)])

            @pl.loop(jnp.maximum(done, self.sizes.stages), done + self.sizes.stages)
            def wait_for_the_last_tiles(step):
                for freed in free:
                    plgpu.barrier_wait(freed.at[lax.rem(step, self.sizes.stages)])

        @pl.when(lax.axis_index("warpgroup") == 0)
        def compute():
            slopes, key_turns = self._slopes(operands), self._key_turns(operands)

            def attend_item(number, now, following, done):
                slot = lax.rem(number - begin, 2)
                bounds = (
                    self._of_rows(operands.first, now),
                    now.end_key if operands.end is None else self._of_rows(operands.end, now),
                    self._of_rows(operands.position, now),
                )
                plgpu.barrier_wait(q_full.at[slot])
                rows = _Rows(*bounds, self._queries(q_smem.at[slot]))
                acc, top, total = self._attend(
                    operands,
                    now,
                    rows,
                    (slopes, key_turns),
                    q_smem.at[slot],
                    pages_smem,
                    readied,
                    p_smem,
                    full,
                    free,
                    done,
                )
                plgpu.barrier_arrive(q_free.at[slot])
                factor = None if operands.out_factor is None else operands.out_factor[head]
                self._store(acc, top, total, factor, result_smem, out_refs, now, number)
                return done + now.end - now.first

            walk(attend_item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    def _pages(self, operands, item, tile):
        return self.copies.pages(operands.page_table, item.sequence, tile, jnp.maximum(item.end_key - 1, 0))

    def _load_pages(self, operands, item, following, place, pages_smem, full, free, state):
        """An item's tiles of k and v in turn; page numbers come from memory too, so they are asked for a tile ahead."""
        stages, block_kv = self.sizes.stages, self.sizes.block_kv
        begun, pages = state

        def load_tile(tile, pages):
            is_last = tile + 1 == item.end
            source = jax.tree.map(lambda of_next, own: jnp.where(is_last, of_next, own), following, item)
            next_pages = self._pages(operands, source, jnp.where(is_last, following.first, tile + 1))
            step = begun + tile - item.first
            stage = lax.rem(step, stages)
            parts = zip((operands.k_pages, operands.v_pages), pages_smem, full, free, strict=True)
            for of_values, (pages_ref, smem, filled, freed) in enumerate(parts):
                pl.when(step >= stages)(lambda freed=freed: plgpu.barrier_wait(freed.at[stage]))
                start = functools.partial(
                    self.copies.start,
                    pages_ref,
                    PoolPlace(*place, of_values),
                    pages,
                    tile,
                    smem.at[stage],
                    filled.at[stage],
                )
                is_whole = (tile + 1) * block_kv <= item.end_key
                pl.when(is_whole)(start)
                pl.when(jnp.logical_not(is_whole))(functools.partial(start, item.end_key))
            return next_pages

        def skip_item(_, pages):
            return self._pages(operands, following, following.first)

        pages = lax.fori_loop(item.first, item.end, load_tile, pages)
        pages = lax.fori_loop(0, jnp.where(item.first < item.end, 0, 1), skip_item, pages)
        return begun + item.end - item.first, pages

    def _attend(self, operands, item, rows, constants, q_smem, pages_smem, readied, p_smem, full, free, done):
        """Unnormalised output [Hv, rows], largest scaled score (base 2) and sum of each row."""
        block_rows, block_kv, stages = self.sizes.block_rows, self.sizes.block_kv, self.sizes.stages
        (k_smem, v_smem), (k_full, v_full), (k_free, v_free) = pages_smem, full, free
        shape = (block_kv, block_rows)
        slopes, key_turns = constants
        factor = None
        if operands.logit_factor is not None:
            of = jnp.minimum(item.sequence, operands.logit_factor.shape[0] - 1)
            factor = operands.logit_factor[of, lax.axis_index("head")]

        def attend_tile(tile, carry):
            acc, top, total, (mask, turn) = carry
            stage = lax.rem(done + tile - item.first, stages)
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + tile * block_kv
            ahead = self._ahead(operands, item, tile + 1)

            values = readied.values if self.widens else v_smem.at[stage]
            if self.turns:
                turn_queries_back(rows.queries, readied.queries, turn)
            plgpu.barrier_wait(k_full.at[stage])
            if self.readies_keys:
                self._ready_keys(k_smem.at[stage], readied.keys, key_turns)
                plgpu.barrier_arrive(k_free.at[stage])

            def scores(ref):
                keys = readied.keys if self.readies_keys else k_smem.at[stage]
                queries = readied.queries if self.turns else q_smem
                plgpu.wgmma(ref, keys, queries.transpose((1, 0)))
                if self.widens:
                    plgpu.barrier_wait(v_full.at[stage])
                    widen(v_smem.at[stage], values)
                    plgpu.barrier_arrive(v_free.at[stage])
                return ref[...]

            s = pl.run_scoped(scores, tiles.accumulator(*shape))
            if not self.readies_keys:
                plgpu.barrier_arrive(k_free.at[stage])
            distance = None if rows.position is None else key - self._spread(rows.position)
            s = base2_logits(s, self.spec, factor=factor, slope=slopes, distance=distance)
            s = jnp.where(self._visible(key, rows, mask), s, -jnp.inf)

            new_top = jnp.maximum(top, s.max(axis=0))
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            p = jnp.exp2(s - self._spread(shift))
            keep = jnp.exp2(top - shift)
            p_smem.transpose((1, 0))[...] = p.astype(self.dtype)
            plgpu.commit_smem()
            acc = acc * lax.broadcast_in_dim(keep, acc.shape, [1])
            total = total * self._spread(keep) + p  # summed over the keys in the end
            if not self.widens:
                plgpu.barrier_wait(v_full.at[stage])
            keys_left = item.end_key - tile * block_kv
            pl.when(keys_left < block_kv)(lambda: tiles.zero_rows_from(values, keys_left))
            acc = tiles.accumulate(acc, values.transpose((1, 0)), p_smem.transpose((1, 0)))
            if not self.widens:
                plgpu.barrier_arrive(v_free.at[stage])
            return acc, new_top, total, ahead

        per_row = plgpu.Layout.WGMMA.reduce(0)
        start = (
            plgpu.layout_cast(jnp.zeros((value_columns(self.spec), block_rows), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((block_rows,), -jnp.inf, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA),
            self._ahead(operands, item, item.first),
        )
        acc, top, total, _ = lax.fori_loop(item.first, item.end, attend_tile, start)
        return acc, top, total.sum(axis=0)

    def _spread(self, of_rows):
        """A number of each row, or one for all, for every key."""
        if not jnp.ndim(of_rows):
            return of_rows
        return lax.broadcast_in_dim(of_rows, (self.sizes.block_kv, self.sizes.block_rows), [1])

    def _of_rows(self, ref, item):
        """What memory holds of an item's rows."""
        if ref is None:
            return None
        if self.num_tokens == 1:
            return ref[item.sequence]
        rows = pl.ds(lax.axis_index("rows") * self.sizes.block_rows, self.sizes.block_rows)
        return plgpu.load(ref.at[item.sequence, rows], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)

    def _slopes(self, operands):
        if operands.slopes is None:
            return None
        block = lax.div(lax.axis_index("head"), self.heads_a_block) * self.row_blocks + lax.axis_index("rows")
        rows = pl.ds(block * self.sizes.block_rows, self.sizes.block_rows)
        slopes = plgpu.load(operands.slopes.at[rows], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return self._spread(slopes)

    def _ahead(self, operands, item, tile):
        """What memory holds for a tile: mask words of its keys, and the turn of its first key. Read a tile ahead."""
        load = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        mask = turn = None
        if operands.mask is not None:
            block_kv = self.sizes.block_kv
            first = jnp.minimum(tile, operands.mask.shape[1] // block_kv - 1) * block_kv
            mask = load(operands.mask.at[item.sequence, pl.ds(first, block_kv)])
        if self.turns:
            which = jnp.minimum(tile, operands.tile_turns.cos.shape[0] - 1)
            turn = Turn(*(load(part.at[which]) for part in operands.tile_turns))
        return mask, turn

    def _key_turns(self, operands):
        if not self.turns:
            return None
        return Turn(*(plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False) for part in operands.key_turns))

    def _ready_keys(self, source, target, key_turns):
        if self.widens:
            widen(source, target)
        if self.turns:
            turn_keys(target if self.widens else source, target, key_turns)

    def _queries(self, q_smem):
        """Both halves of queries that are turned for each tile, in registers."""
        if not self.turns:
            return None
        half = self.spec.head_dim // 2
        halves = (q_smem.at[pl.ds(begin, half)] for begin in (0, half))
        return tuple(plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False) for part in halves)

    def _visible(self, key, rows, mask):
        """Which keys of a tile each row sees."""
        seen = key < self._spread(rows.end)
        if rows.first is not None:
            seen &= key >= self._spread(rows.first)
        if mask is not None:
            first_row = lax.axis_index("rows") * self.sizes.block_rows
            row = first_row + plgpu.broadcasted_iota(jnp.int32, key.shape, 1, layout=plgpu.Layout.WGMMA)
            token = lax.div(row, self.spec.group_size)
            bit = lax.shift_right_logical(lax.broadcast_in_dim(mask, key.shape, [0]), token)
            seen &= (bit & 1) == 1
        return seen

    def _store(self, acc, top, total, factor, result_smem, out_refs, item, number):
        """The result of an item: where the sequence's lies, or among the parts."""
        out_ref, lse_ref, part_outs_ref, part_lses_ref = out_refs
        out_smem, lse_smem = result_smem
        head, row_block = lax.axis_index("head"), lax.axis_index("rows")
        empty = top == -jnp.inf
        safe_total = jnp.where(empty, 1.0, total)
        out = acc / lax.broadcast_in_dim(safe_total, acc.shape, [1])
        out = out if factor is None else out * factor
        plgpu.wait_smem_to_gmem(0)  # the last item's
        out_smem.transpose((1, 0))[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        lse_smem[...] = jnp.where(empty, -jnp.inf, (top + jnp.log2(safe_total)) / LOG2E)
        plgpu.commit_smem()

        @pl.when(item.parts > 1)
        def store_part():
            rows = pl.ds(row_block * self.sizes.block_rows, self.sizes.block_rows)
            plgpu.copy_smem_to_gmem(out_smem, part_outs_ref.at[number, head, rows])
            plgpu.copy_smem_to_gmem(lse_smem, part_lses_ref.at[number, head, rows])

        @pl.when(item.parts == 1)
        def store_sequence():
            own = lax.rem(head, self.heads_a_block) * self.rows
            shape = (self.rows, value_columns(self.spec))
            layout = plgpu.Layout.WG_STRIDED(shape, vec_size=math.gcd(math.prod(shape) // _THREADS, 8))
            result = plgpu.load(out_smem.at[pl.ds(own, self.rows)], layout=layout, optimized=False)
            out_ref[item.sequence, head, pl.ds(row_block * self.rows, self.rows)] = result.astype(self.out_dtype)
            for row in range(self.rows):
                lse_ref[item.sequence, head, row_block * self.rows + row] = lse_smem[own + row]
