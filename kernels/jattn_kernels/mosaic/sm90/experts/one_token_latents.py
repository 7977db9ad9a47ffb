"""What one token's mixture may begin with where keys are latent rows: attention over them, split over the blocks.

A latent row is key and value of all heads, so a block has all heads, and every so many tiles of 64 rows: five stages
of the ring, two groups of 64 columns each, one below the other. Two blocks have the same tiles, and each half of the
columns that are values. Queries have taken up the keys' projection before; a block has them in the row's room, eight
heads after eight. The weights of the products that follow come meanwhile. What splits leave each other are their means,
and the logarithms of their sums, in base 2 (`one_token_values`).
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.call import AttentionCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.arrivals import never_zero
from jattn_kernels.mosaic.sm90.common.indexed import store_all, store_at
from jattn_kernels.mosaic.sm90.common.logits import base2_logits
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS, PageCopies, PoolPlace
from jattn_kernels.mosaic.sm90.experts.one_token_attention import Share, SplitRoom
from jattn_kernels.mosaic.sm90.experts.one_token_rows import clear_rows
from jattn_kernels.mosaic.sm90.experts.one_token_stages import DEPTH, STAGES, Scratch
from jattn_kernels.spec import AttentionSpec

MOST_SPLITS = 64
_MOST_HEADS = 16
_HALVES = DEPTH // WGMMA_ROWS  # of a stage: groups of columns
_SIDES = 2  # of the columns that are values, a block each
_ROWS = WGMMA_ROWS  # of a tile
_WGMMA, _OF_HEADS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class LatentPhase:
    """The phase before the values'.

    Attributes:
        spec: The layer's.
        page_size: Tokens a page.
    """

    spec: AttentionSpec
    page_size: int

    @property
    def compressed(self) -> int:
        """Numbers of a row that are values."""
        return self.spec.value_dim

    @property
    def row(self) -> int:
        """Numbers of a row of shared memory that the queries take."""
        return self._eights * self.spec.head_dim

    @property
    def record(self) -> int:
        """Numbers of a split's results."""
        return self.spec.num_q_heads * (self.compressed + 1)

    @property
    def splits(self) -> int:
        """At most, each of two blocks."""
        return min(MOST_SPLITS, tiles.num_sms() // _SIDES)

    @property
    def copies(self) -> PageCopies:
        return PageCopies.of(self.spec, _ROWS, self.page_size)

    @property
    def arrivals(self) -> int:
        """Copies of a stage."""
        return _HALVES * self.copies.copies

    @property
    def query_copies(self) -> int:
        return 2 * self._eights

    @property
    def _eights(self) -> int:
        """Of heads."""
        return self.spec.num_q_heads // TILED_ROWS

    @property
    def _groups(self) -> int:
        """Of 64 columns of a row."""
        return self.spec.head_dim // WGMMA_ROWS

    @property
    def _stages(self) -> int:
        """Of a tile."""
        return pl.cdiv(self._groups, _HALVES)

    def rows_in(self, parts: int, columns: int) -> int:
        """Rows of each part that there must be for it."""
        return pl.cdiv(pl.cdiv(self.splits, parts) * self.record, columns)

    def share(self, seq_len: Any, split: Any) -> Share:
        """Of the tiles of so many rows."""
        all_tiles = jnp.maximum(lax.div(seq_len + (_ROWS - 1), _ROWS), 1)
        each = lax.div(all_tiles + self.splits - 1, self.splits)
        first = jnp.minimum(split * each, all_tiles)
        return Share(first, jnp.minimum(first + each, all_tiles), lax.div(all_tiles + each - 1, each), seq_len)

    def _own(self, operands: Any) -> tuple[Any, Any, Share]:
        """The block's split, its side of the values' columns, and its share."""
        split, side = (op(lax.axis_index("block"), _SIDES) for op in (lax.div, lax.rem))
        return split, side, self.share(operands.seq_lens[0], split)

    def produce(self, operands: Any, scratch: Scratch, done: Any) -> Any:
        """Asks for the block's queries and rows; the stages asked for then, `done` being those of before."""
        layer, (_, _, share) = operands.layer_index[0], self._own(operands)
        last_row = jnp.maximum(share.end_key - 1, 0)

        @pl.when(share.first < share.end)
        def copy_queries():
            for eight in range(self._eights):
                heads, begin = pl.ds(eight * TILED_ROWS, TILED_ROWS), eight * self.spec.head_dim
                for q, first in ((operands.q, 0), (operands.q_pe, self.compressed)):
                    target = scratch.x.at[:, pl.ds(begin + first, q.shape[-1])]
                    plgpu.copy_gmem_to_smem(q.at[heads], target, scratch.queries_full)

        @pl.loop(share.first, share.end)
        def copy_tile(tile):
            pages = self.copies.pages(operands.page_table, jnp.int32(0), tile, last_row)

            @pl.loop(0, self._stages)
            def copy_stage(number):
                position = done + (tile - share.first) * self._stages + number
                stage = lax.rem(position, STAGES)
                pl.when(position >= STAGES)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                for half in range(_HALVES):  # the last group twice where there is no other
                    group = jnp.minimum(number * _HALVES + half, self._groups - 1)
                    self.copies.start(
                        operands.pages,
                        PoolPlace(layer, 0, 0),
                        pages,
                        tile,
                        scratch.kernel.at[stage, pl.ds(half * _ROWS, _ROWS)],
                        scratch.keys_full.at[stage],
                        end_key=share.end_key,
                        columns=pl.ds(group * WGMMA_ROWS, WGMMA_ROWS),
                    )

        return done + (share.end - share.first) * self._stages

    def consume(self, operands: Any, room: SplitRoom, scratch: Scratch, done: Any) -> Any:
        """Stores the block's side of a split; the stages that have been used then."""
        split, side, share = self._own(operands)

        @pl.when((share.first < share.end) & (split < self.splits))
        def attend():
            plgpu.barrier_wait(scratch.queries_full)
            results = self._attend(share, side, scratch, done)
            begin, heads = room.of(split, self.record), self.spec.num_q_heads
            first = side * (self._of_side * WGMMA_ROWS)
            for eight, (outs, log_sum) in enumerate(results):
                for group, out in enumerate(outs):
                    places = (plgpu.broadcasted_iota(jnp.int32, out.shape, axis, layout=_WGMMA) for axis in range(2))
                    column, head = places
                    place = begin + first + (eight * TILED_ROWS + head) * self.compressed + group * WGMMA_ROWS + column
                    store_all(room.ref, place, never_zero(out), _WGMMA)
                head = plgpu.broadcasted_iota(jnp.int32, log_sum.shape, 0, layout=_OF_HEADS)
                place = begin + heads * self.compressed + eight * TILED_ROWS + head
                place -= jnp.where(side == 0, 0, 1 << 30)  # by one of both blocks
                store_at(room.ref, place, never_zero(log_sum), _OF_HEADS)

        return done + (share.end - share.first) * self._stages

    @property
    def _of_side(self) -> int:
        """Groups of columns."""
        return self.compressed // WGMMA_ROWS // _SIDES

    def _attend(self, share: Share, side: Any, scratch: Scratch, done: Any) -> list[tuple[list[jax.Array], jax.Array]]:
        """Of each eight heads the means of rows, [64, 8] for each group of columns, and the logarithms of sums."""
        shape, width, of_side = (_ROWS, TILED_ROWS), self.spec.head_dim, self._of_side

        def attend_tile(tile, carry):
            first = done + (tile - share.first) * self._stages

            def stage_of(number: Any) -> Any:
                return lax.rem(first + number, STAGES)

            def rows_of(group: Any) -> Any:
                """The tile's rows of a group of columns."""
                stage, half = stage_of(lax.div(group, _HALVES)), lax.rem(group, _HALVES)
                return scratch.kernel.at[stage, pl.ds(pl.multiple_of(half * _ROWS, _ROWS), _ROWS)]

            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA) + tile * _ROWS

            def scores(*sums):
                @pl.loop(0, self._groups)
                def multiply(group):
                    pl.when(lax.rem(group, _HALVES) == 0)(
                        lambda: plgpu.barrier_wait(scratch.keys_full.at[stage_of(lax.div(group, _HALVES))])
                    )
                    for eight, ref in enumerate(sums):
                        begin = pl.multiple_of(eight * width + group * WGMMA_ROWS, WGMMA_ROWS)
                        q = scratch.x.at[:, pl.ds(begin, WGMMA_ROWS)]
                        plgpu.wgmma(ref, rows_of(group), q.transpose((1, 0)))

                return [ref[...] for ref in sums]

            found = pl.run_scoped(scores, *(tiles.accumulator(*shape) for _ in range(self._eights)))
            rows_left = share.end_key - tile * _ROWS

            @pl.when(rows_left < _ROWS)
            def clear():
                @pl.loop(0, self._stages)
                def clear_stage(number):
                    clear_rows(scratch.kernel.at[stage_of(number)], rows_left)

                plgpu.commit_smem()

            factors, new = [], []
            for eight, (s, (_, m_i, l_i)) in enumerate(zip(found, carry, strict=True)):
                s = jnp.where(row < share.end_key, base2_logits(s, self.spec), -jnp.inf)
                m_new = jnp.maximum(m_i, s.max(axis=0))
                shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
                p, alpha = jnp.exp2(s - _spread(shift, shape)), jnp.exp2(m_i - shift)
                scratch.p.at[pl.ds(eight * TILED_ROWS, TILED_ROWS)].transpose((1, 0))[...] = p.astype(scratch.p.dtype)
                factors.append(_spread(alpha, shape))
                new.append((m_new, l_i * _spread(alpha, shape) + p))
            plgpu.commit_smem()

            def means(*sums):
                for number, ref in enumerate(sums):
                    eight, group = divmod(number, of_side)
                    p = scratch.p.at[pl.ds(eight * TILED_ROWS, TILED_ROWS)]
                    plgpu.wgmma(ref, rows_of(side * of_side + group).transpose((1, 0)), p.transpose((1, 0)))
                return [ref[...] for ref in sums]

            count = self._eights * of_side
            more = pl.run_scoped(means, *(tiles.accumulator(WGMMA_ROWS, TILED_ROWS) for _ in range(count)))

            @pl.loop(0, self._stages)
            def free(number):
                plgpu.barrier_arrive(scratch.empty.at[stage_of(number)])

            return [
                ([acc * factor + more[eight * of_side + group] for group, acc in enumerate(accs)], *sums)
                for eight, ((accs, _, _), factor, sums) in enumerate(zip(carry, factors, new, strict=True))
            ]

        def start():
            accs = [plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, TILED_ROWS), jnp.float32), _WGMMA) for _ in range(of_side)]
            least = plgpu.layout_cast(jnp.full((TILED_ROWS,), -jnp.inf, jnp.float32), _OF_HEADS)
            return accs, least, plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _WGMMA)

        found = lax.fori_loop(share.first, share.end, attend_tile, [start() for _ in range(self._eights)])
        results = []
        for accs, m_i, l_i in found:
            l_i, empty = l_i.sum(axis=0), m_i == -jnp.inf
            safe_l_i = jnp.where(empty, 1.0, l_i)
            inverse = _spread(1.0 / safe_l_i, (WGMMA_ROWS, TILED_ROWS))
            log_sum = jnp.where(empty, -jnp.inf, m_i + jnp.log2(safe_l_i))
            results.append(([acc * inverse for acc in accs], log_sum))
        return results


def _spread(of_heads: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(of_heads, shape, [1])


def fits(call: AttentionCall) -> bool:
    """Whether the phase serves a call."""
    spec = call.spec
    plain = AttentionSpec(
        num_q_heads=spec.num_q_heads,
        num_kv_heads=1,
        head_dim=spec.head_dim,
        v_head_dim=spec.value_dim,
        sm_scale=spec.sm_scale,
    )
    return (
        call.operation == "mla_decode"
        and call.num_seqs == 1
        and call.num_tokens == 1
        and call.kv_dtype == call.q_dtype
        and call.features <= {"layer_index"}
        and spec == plain
        and spec.num_q_heads % TILED_ROWS == 0
        and spec.num_q_heads <= _MOST_HEADS
        and spec.value_dim % (_SIDES * WGMMA_ROWS) == 0
        and spec.head_dim % WGMMA_ROWS == 0
        and call.page_size is not None
        and (_ROWS % call.page_size == 0 or call.page_size % _ROWS == 0)
        and call.page_size % TILED_ROWS == 0
        and pl.cdiv(spec.head_dim // WGMMA_ROWS, _HALVES) <= STAGES
    )
