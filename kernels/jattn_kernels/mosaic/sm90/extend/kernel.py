"""The kernel of extend on Hopper: ragged queries over keys, FlashAttention-3's two consumers in ping-pong.

grid (blocks)             persistent: one an SM; each takes every blocks-th work tile, as `order` has them
  a work tile             a query block (up to `block_tokens` tokens of one request) and a block of heads
  producer warpgroup      TMA: the next work tile's q, then k and v a tile of `block_kv` keys at a time, tiles ahead
  consumer warpgroups     64 rows each: S = q k^T, online softmax in base 2, acc += P v; epilogue: acc / l_i and lse out
  q_full, q_empty         producer -> consumer, and back: a warpgroup's q has arrived; is in the form that wgmma reads
  k_full, v_full          producer -> consumer: the copies of a tile have arrived, and v holds only the request's rows
  k_empty, v_empty        both consumers -> producer: the tile may be overwritten
  schedule_barrier        consumer <-> consumer: while one multiplies, the other does its softmax (ping-pong, Shah et
                          al. 2024; the online softmax itself is Milakov & Gimelshein's of 2018)
  converter warpgroup     only where values are fp8 or keys are rotated: between producer and consumers, `converter`
shared memory: q of both as it arrives and as wgmma reads it, tiles of k and of v; the output takes q's place

A tile's 64 rows are some heads of one group times as many tokens as fit, head by head: so a prompt reads its prefix
once a kv head even if it has only a few tokens, and the warpgroups of a long one see nearly the same keys. Requests
begin at any token, while wgmma's tiles are made of 8 rows: queries and results pass through untiled staging memory,
where any row may begin, rather than through copies in XLA, which would read and write all of q and out once more.

Of a request's tiles of keys a work tile reads those that some row of it sees, and a warpgroup skips what no row of its
own sees. Only tiles that some of its rows do not see whole are masked; where neither window nor chunk, mask nor
position is given, one number a work tile tells which.

fp8 keys are multiplied as they are, with queries that are sums of such numbers; fp8 values are dequantised to float16,
which holds them exactly, and so are keys that are rotated. Features that a call does not use leave nothing in its
kernel.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.row_copies import RowCopies
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS, PageCopies
from jattn_kernels.mosaic.sm90.extend.converter import Converter
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendDtypes
from jattn_kernels.mosaic.sm90.extend.epilogue import Epilogue
from jattn_kernels.mosaic.sm90.extend.producer import Producer
from jattn_kernels.mosaic.sm90.extend.registers import Registers
from jattn_kernels.mosaic.sm90.extend.rows import CONSUMER_WARPGROUPS
from jattn_kernels.mosaic.sm90.extend.schedule import (
    ExtendTiles,
    heads_per_tile,
    staged_pieces,
)
from jattn_kernels.mosaic.sm90.extend.shared_memory import SharedMemory, shared_memory
from jattn_kernels.mosaic.sm90.extend.work_tile import Operands, TilePair, TileRows, Tiles, WorkTile
from jattn_kernels.spec import AttentionSpec

_PRODUCER, _CONVERTER = CONSUMER_WARPGROUPS, CONSUMER_WARPGROUPS + 1  # numbers of warpgroups


@dataclasses.dataclass(frozen=True)
class ExtendKernel:
    """The kernel of one configuration.

    Attributes:
        copies: Of a tile of keys or values.
        dtypes: Dtypes.
    """

    spec: AttentionSpec
    sizes: ExtendTiles
    copies: PageCopies | RowCopies
    dtypes: ExtendDtypes

    @property
    def heads(self) -> int:
        """Heads that share a tile's rows."""
        return heads_per_tile(self.spec.group_size)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile, each of them one row of each head."""
        return WGMMA_ROWS // self.heads

    @property
    def value_parts(self) -> list[Any]:
        """Columns of the products with values, those of one product together."""
        # Of four warpgroups none starts with more than 128 registers, which no instruction's operands may exceed.
        most = 128 if self.dtypes.converts and self.spec.value_dim > 192 else self.spec.value_dim
        return [pl.ds(column, most) for column in range(0, self.spec.value_dim, most)]

    @property
    def head_blocks(self) -> int:
        return self.spec.num_q_heads // self.heads

    def blocks(self, num_query_blocks: int) -> int:
        """Blocks of the grid."""
        return min(self.sizes.blocks, num_query_blocks * self.head_blocks)

    def __call__(self, operands: Operands):
        """Output by token, and float32 lse of each query block's rows: [query blocks, head blocks, warpgroups, 64]."""
        num_query_blocks = operands.query_blocks.shape[0]
        leaves, tree = jax.tree.flatten(operands)
        run = launch.kernel(
            functools.partial(self._entry, tree),
            out_type=[
                jax.ShapeDtypeStruct((*operands.q.shape[:2], self.spec.value_dim), self.dtypes.out),
                jax.ShapeDtypeStruct(
                    (num_query_blocks, self.head_blocks, CONSUMER_WARPGROUPS, WGMMA_ROWS), jnp.float32
                ),
            ],
            grid=(self.blocks(num_query_blocks),),
            grid_names=("block",),
            num_threads=_CONVERTER + 1 if self.dtypes.converts else _PRODUCER + 1,
            kernel_name="paged_extend",
        )
        return run(*leaves)

    def _entry(self, tree, *refs):
        operands, out_refs = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves :]
        pl.run_scoped(
            functools.partial(self._body, operands, out_refs),
            shared_memory(self.spec, self.sizes, self.dtypes, copies=self.copies.copies, heads=self.heads),
            collective_axes="warpgroup",
        )

    def _body(self, operands: Operands, out_refs, scratch: SharedMemory):
        query_blocks_ref, (out_ref, lse_ref) = operands.query_blocks, out_refs
        (q_smem, out_smem), q_staging, p_smem, schedule_barrier = (
            scratch.q_and_out,
            scratch.q_staging,
            scratch.p,
            scratch.schedule_barrier,
        )
        converted = TilePair(*map(_over, scratch.converted, scratch.copied))
        registers = Registers.of(self.dtypes)
        warpgroup = lax.axis_index("warpgroup")
        work_tiles = operands.num_query_blocks[0] * self.head_blocks
        block, blocks = lax.axis_index("block"), self.blocks(query_blocks_ref.shape[0])

        def number(round):
            """Back and forth, so that no block always has the longest of each round."""
            backwards = lax.rem(round, 2) == 1
            return round * blocks + jnp.where(backwards, blocks - 1 - block, block)

        whole_rounds = lax.div(work_tiles, blocks)
        rounds = whole_rounds + jnp.where(number(whole_rounds) < work_tiles, 1, 0)

        def work_tile(round):
            of = jnp.minimum(number(round), query_blocks_ref.shape[0] * self.head_blocks - 1)
            of = of if operands.order is None else operands.order[of]
            query_block = lax.div(of, self.head_blocks)
            fields = (query_blocks_ref[query_block, field] for field in range(query_blocks_ref.shape[1]))
            return WorkTile(query_block, lax.rem(of, self.head_blocks), *fields)

        @pl.when(warpgroup == _PRODUCER)
        def producer():
            plgpu.set_max_registers(registers.producer, action="decrease")
            producer = Producer(
                self.spec,
                self.sizes,
                self.copies,
                self.heads,
                self.tile_tokens,
                operands,
                q_staging,
                scratch.q_full,
                scratch.q_empty,
                scratch.copied,
                scratch.last_v_full,
            )
            producer.run(work_tile, rounds)

        if self.dtypes.converts:

            @pl.when(warpgroup == _CONVERTER)
            def converter():
                plgpu.set_max_registers(registers.converter, action="decrease")
                Converter(self.dtypes, operands, scratch.copied, converted).run(work_tile, rounds)

        @pl.when(warpgroup < CONSUMER_WARPGROUPS)
        def consumer():
            plgpu.set_max_registers(registers.consumer, action="increase")
            own = (None if ref is None else ref.at[warpgroup] for ref in (q_smem, q_staging, p_smem, out_smem))
            own_q, own_staging, own_p, own_out = own
            epilogue = Epilogue(
                spec=self.spec,
                heads=self.heads,
                tile_tokens=self.tile_tokens,
                out=out_ref,
                lse=lse_ref,
                out_factor=operands.out_factor,
            )

            def attend_work_tile(round, carry):
                done, now = carry
                begun = now.begun(done)
                following = work_tile(round + 1)  # read long before it is needed
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
                arrived, taken = scratch.q_full.at[warpgroup], scratch.q_empty.at[warpgroup]
                self._take_queries(own_staging, own_q, arrived, taken, rows)
                pl.when(warpgroup == 1)(lambda: self._perform_schedule_barrier(schedule_barrier))
                sums = self._attend(own_q, converted, own_p, schedule_barrier, now, rows, begun)
                pl.when(warpgroup == 0)(lambda: self._perform_schedule_barrier(schedule_barrier))
                pl.when(tokens > 0)(lambda: epilogue.store(now, warpgroup, skipped, tokens, own_out, sums))
                return begun + now.end_tile, following

            lax.fori_loop(0, rounds, attend_work_tile, (jnp.int32(0), work_tile(0)))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _take_queries(self, staging, q_smem, q_full, q_empty, rows):
        """Prologue: rows of a tile into the form that wgmma reads."""
        width = staging.shape[-1]
        layout = plgpu.Layout.WGMMA_UPCAST_2X if self.dtypes.q.itemsize == 1 else plgpu.Layout.WGMMA
        for column in staged_pieces(self.dtypes.query_columns(self.spec.head_dim), width):
            plgpu.barrier_wait(q_full)
            q = plgpu.load(staging, layout=layout, optimized=False)
            plgpu.wait_smem_to_gmem(0)  # the last work tile's output lies where q goes
            # Where only a scale makes logits of products, the largest is taken before it scales.
            q_smem[:, pl.ds(column, width)] = -q if rows.is_negated else q
            plgpu.commit_smem()
            plgpu.barrier_arrive(q_empty)

    def _attend(self, q_smem, converted, p_smem, schedule_barrier, work_tile, rows, begun):
        """Unnormalised output acc, largest scaled score m_i (base 2) and sum l_i of each row."""
        keys, values = converted
        block_kv, head_dim = self.sizes.block_kv, self.spec.head_dim
        factor, only_scaled = rows.scale, rows.only_scaled
        per_row = plgpu.Layout.WGMMA.reduce(1)
        spans = rows.spans()

        def wait_for_k(tile, end):
            pl.when(tile < end)(lambda: plgpu.barrier_wait(keys.full.at[keys.stage(begun + tile)]))

        def attend_tile(tile, carry, masked):
            acc, m_i, l_i = carry
            k_stage, v_stage = keys.stage(begun + tile), values.stage(begun + tile)
            mask = rows.mask_words(tile)

            def scores(ref):
                for part in range(self.dtypes.q_parts):
                    q = q_smem if q_smem.shape[-1] == head_dim else q_smem.at[:, pl.ds(part * head_dim, head_dim)]
                    plgpu.wgmma(ref, q, keys.smem.at[k_stage].transpose((1, 0)))
                self._perform_schedule_barrier(schedule_barrier)
                return ref[...]

            s = pl.run_scoped(scores, tiles.accumulator(WGMMA_ROWS, block_kv))
            plgpu.barrier_arrive(keys.empty.at[k_stage])
            if masked or not only_scaled:
                seen = rows.visible(tile, mask) if masked else None
                s = s * rows.spread(factor) if only_scaled else rows.logits(s, tile)
                s = s if seen is None else jnp.where(seen, s, -jnp.inf)
                m_new = jnp.maximum(m_i, s.max(axis=1))
                shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
                p = jnp.exp2(s - lax.broadcast_in_dim(shift, s.shape, [0]))
            else:
                m_new = shift = jnp.maximum(m_i, s.max(axis=1) * factor)
                p = jnp.exp2(
                    s * rows.spread(factor) - lax.broadcast_in_dim(shift, s.shape, [0])
                )  # one fused multiply-add each
            alpha = jnp.exp2(m_i - shift)
            acc = [part * _spread(alpha, part) for part in acc]
            l_i = l_i * alpha
            probabilities = p.astype(self.dtypes.product)
            # The order that the kernel was tuned with, as in JAX's attention_mgpu: the sum before the schedule barrier,
            # and held there by another one, where the accumulator is narrow; behind it where it is wide. What is known
            # of it is that results do not depend on it.
            if self.spec.value_dim <= 128:
                l_i = l_i + p.sum(axis=1)
                acc, l_i, m_new, probabilities = lax.optimization_barrier((acc, l_i, m_new, probabilities))
            plgpu.barrier_arrive(schedule_barrier)
            plgpu.barrier_wait(values.full.at[v_stage])
            plgpu.barrier_wait(schedule_barrier)
            if self.spec.value_dim > 128:
                l_i = l_i + p.sum(axis=1)
            next_k = functools.partial(wait_for_k, tile + 1, spans[-1][1])
            v_smem, products = values.smem.at[v_stage], []
            for part, columns in zip(acc, self.value_parts, strict=True):
                v = v_smem.at[:, columns] if len(acc) > 1 else v_smem
                last = len(products) + 1 == len(acc)
                products.append(tiles.add_product(part, probabilities, v, p_smem, next_k if last else lambda: None))
            plgpu.barrier_arrive(values.empty.at[v_stage])
            return products, m_new, l_i

        def skip_tile(tile):
            """Keeps the others' time: the memory and the other warpgroup still have this tile to do."""
            for each in converted:
                stage = each.stage(begun + tile)
                plgpu.barrier_wait(each.full.at[stage])
                plgpu.barrier_arrive(each.empty.at[stage])
                self._perform_schedule_barrier(schedule_barrier)

        carry = (
            [
                plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, columns.size), jnp.float32), plgpu.Layout.WGMMA)
                for columns in self.value_parts
            ],
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

    def _kv_head(self, work_tile):
        return work_tile.kv_head(self.spec, self.heads)

    def _perform_schedule_barrier(self, schedule_barrier):
        plgpu.barrier_arrive(schedule_barrier)
        plgpu.barrier_wait(schedule_barrier)


def _spread(of_rows: jax.Array, part: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(of_rows, part.shape, [0])


def _over(own: Tiles, other: Tiles) -> Tiles:
    """Tiles of which what is None is the other's."""
    return Tiles(*(theirs if part is None else part for part, theirs in zip(own, other, strict=True)))
