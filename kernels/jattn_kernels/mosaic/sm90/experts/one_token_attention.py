"""What one token's mixture may begin with: the attention of that token, whose keys are split over the blocks.

A block has one head of keys and every so many of its tiles: k and v of 64 keys are two stages of the ring, each in two
halves of 64 columns, one below the other. It turns its head's queries itself; the block that has the last tile turns
the token's key too (`token_heads`), puts it and the value into the tile, and then into their page. The weights of
the product that follows come meanwhile. What splits leave each other are their outputs, normalised, and the logarithms
of their sums, in base 2 (`one_token_merge`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.call import AttentionCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.arrivals import never_zero
from jattn_kernels.mosaic.sm90.common.indexed import store_at
from jattn_kernels.mosaic.sm90.common.logits import base2_logits
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS, PageCopies, PoolPlace
from jattn_kernels.mosaic.sm90.common.token_heads import TokenHeads
from jattn_kernels.mosaic.sm90.experts.one_token_rows import clear_rows, put_row
from jattn_kernels.mosaic.sm90.experts.one_token_stages import DEPTH, STAGES, Scratch
from jattn_kernels.mosaic.sm90.experts.one_token_turning import turn
from jattn_kernels.spec import AttentionSpec

AT_ONCE = 8  # splits that are merged at a time, and the fewest that there are where there are tiles enough
_MOST_SPLITS = 4 * AT_ONCE
_MANY_TILES = (48, 160, 320)  # more than so many are cut into another 8: a tile more takes less than what is merged
_HALVES = DEPTH // WGMMA_ROWS  # of a row
_KEYS = WGMMA_ROWS  # of a tile
_WGMMA, _OF_ROWS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)


class SplitRoom(NamedTuple):
    """Where splits leave each other their results, float32: outputs of all heads, then a number of each head.

    Attributes:
        ref: In global memory, as `arrivals` wants it.
        begin: Flat place of the first.
        stride, parts: As many splits lie so far apart; then come as many others behind them.
    """

    ref: Any
    begin: int
    stride: int
    parts: int

    @classmethod
    def within(cls, left: Any, first_row: int) -> "SplitRoom":
        """In what is left, from this row of each part on."""
        parts, rows, columns = left.shape
        return cls(left, first_row * columns, rows * columns, parts)

    def of(self, split: Any, record: int) -> Any:
        """Flat place of a split's result of so many numbers."""
        return self.begin + lax.rem(split, self.parts) * self.stride + lax.div(split, self.parts) * record


class Share(NamedTuple):
    """A split's tiles [first, end), how many splits have some, and the end of the keys."""

    first: Any
    end: Any
    busy: Any
    end_key: Any


@dataclasses.dataclass(frozen=True)
class AttentionPhase:
    """The phase before o's product.

    Attributes:
        spec: The layer's.
        page_size: Tokens a page.
    """

    spec: AttentionSpec
    page_size: int

    @property
    def depth(self) -> int:
        """Columns of what it returns."""
        return self.spec.num_q_heads * self.spec.head_dim

    @property
    def record(self) -> int:
        """Numbers of a split's results."""
        return self.depth + self.spec.num_q_heads

    @property
    def splits(self) -> int:
        """Of a head at most."""
        return min(_MOST_SPLITS, tiles.num_sms() // self.spec.num_kv_heads)

    @property
    def copies(self) -> PageCopies:
        return PageCopies.of(self.spec, _KEYS, self.page_size)

    @property
    def arrivals(self) -> int:
        """Copies of a stage."""
        return _HALVES * self.copies.copies

    def fits_in(self, parts: int, rows: int, columns: int) -> bool:
        """Whether there is room in so many rows of each part."""
        return pl.cdiv(self.splits, parts) * self.record <= rows * columns

    def share(self, seq_len: Any, split: Any) -> Share:
        """Of the tiles of so many keys."""
        all_tiles = jnp.maximum(lax.div(seq_len + (_KEYS - 1), _KEYS), 1)
        wanted = AT_ONCE * (1 + sum((all_tiles > many).astype(jnp.int32) for many in _MANY_TILES))
        wanted = jnp.minimum(wanted, self.splits)
        each = lax.div(all_tiles + wanted - 1, wanted)
        first = jnp.minimum(split * each, all_tiles)
        return Share(first, jnp.minimum(first + each, all_tiles), lax.div(all_tiles + each - 1, each), seq_len)

    def _own(self, operands: Any) -> tuple[Any, Any, Share]:
        """The block's head, split and share."""
        split, head = (op(lax.axis_index("block"), self.spec.num_kv_heads) for op in (lax.div, lax.rem))
        return head, split, self.share(operands.seq_lens[0], split)

    def produce(self, operands: Any, scratch: Scratch, done: Any) -> Any:
        """Asks for the block's keys and values; the stages asked for then, `done` being those of before."""
        layer = operands.rotary.layer_index[0]
        head, _, share = self._own(operands)
        last_key = jnp.maximum(share.end_key - 1, 0)

        def copy_share(own: list[Any], is_first: Any) -> None:
            del is_first

            @pl.loop(share.first, share.end)
            def copy_tile(tile):
                pages = self.copies.pages(operands.page_table, jnp.int32(0), tile, last_key, own)
                for of_values, pages_ref in enumerate((operands.rotary.k_pages, operands.rotary.v_pages)):
                    position = done + 2 * (tile - share.first) + of_values
                    stage = lax.rem(position, STAGES)
                    pl.when(position >= STAGES)(lambda stage=stage: plgpu.barrier_wait(scratch.empty.at[stage]))
                    for half in range(_HALVES):
                        self.copies.start(
                            pages_ref,
                            PoolPlace(layer, head, of_values),
                            pages,
                            tile,
                            scratch.kernel.at[stage, pl.ds(half * _KEYS, _KEYS)],
                            scratch.keys_full.at[stage],
                            copies=own,
                            end_key=share.end_key,
                            columns=pl.ds(half * WGMMA_ROWS, WGMMA_ROWS),
                        )

        if self.copies.copies % tiles.WARPS:  # all warps wait for the same stages
            copy_share(list(range(self.copies.copies)), True)
        else:
            tiles.by_warps(self.copies.copies, copy_share)
        return done + 2 * (share.end - share.first)

    def consume(self, operands: Any, room: SplitRoom, scratch: Scratch, done: Any) -> Any:
        """Stores the block's split; the stages that have been used then."""
        rotary: Any = operands.rotary
        layer, norms, scale_layer = rotary.layer_index[0], rotary.norms, None
        if norms is not None and norms.q_scale is not None:
            scale_layer = norms.layer_index[0]
        slot, group = rotary.slots[0], self.spec.group_size
        head, split, share = self._own(operands)
        # No layer is below 0: this says that all numbers are read at once, before the branch.
        is_read = (slot & layer if scale_layer is None else slot & layer & scale_layer) >= 0

        @pl.when((share.first < share.end) & is_read)
        def attend():
            slots = rotary.k_pages.shape[1] * self.page_size
            is_new = (split == share.busy - 1) & (slot >= 0) & (slot < slots) & (share.end_key > 0)
            heads = TokenHeads(rotary.qkv, rotary.cos, rotary.sin, rotary.norms)
            for with_key in (False, True):
                run = functools.partial(turn, heads, self.spec, scratch, head, scale_layer, with_key=with_key)
                pl.when(is_new == with_key)(run)
            plgpu.commit_smem()
            outs, log_sum = self._attend(share, is_new, scratch, done)
            begin = room.of(split, self.record)
            for half, out in enumerate(outs):
                column, row = (plgpu.broadcasted_iota(jnp.int32, out.shape, axis, layout=_WGMMA) for axis in range(2))
                place = begin + (head * group + row) * DEPTH + half * WGMMA_ROWS + column
                store_at(room.ref, jnp.where(row < group, place, -1), never_zero(out), _WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, log_sum.shape, 0, layout=_OF_ROWS)
            place = jnp.where(row < group, begin + self.depth + head * group + row, -1)
            store_at(room.ref, place, never_zero(log_sum), _OF_ROWS)
            pl.when(is_new)(lambda: self._write(rotary, scratch, layer, head, slot))

        return done + 2 * (share.end - share.first)

    def _write(self, operands: Any, scratch: Scratch, layer: Any, head: Any, slot: Any) -> None:
        """The token's key and value into its page, which nobody else reads."""
        page, number = lax.div(slot, self.page_size), lax.rem(slot, self.page_size)
        place = (number, head) if self.spec.page_layout == "NHD" else (head, number)
        layout = plgpu.Layout.WG_STRIDED((DEPTH,), vec_size=1)
        for of_values, pages in enumerate((operands.k_pages, operands.v_pages)):
            pages[layer, page, *place] = plgpu.load(scratch.new.at[of_values], layout=layout, optimized=False)

    def _attend(self, share: Share, is_new: Any, scratch: Scratch, done: Any) -> tuple[list[jax.Array], jax.Array]:
        """Both halves' outputs, [64, rows] each, and the logarithm of each row's sum; decode's formulas."""
        shape = _KEYS, TILED_ROWS

        def attend_tile(tile, carry):
            accs, m_i, l_i = carry
            position = done + 2 * (tile - share.first)
            k_stage, v_stage = (lax.rem(position + of_values, STAGES) for of_values in range(2))
            halves = [pl.ds(half * _KEYS, _KEYS) for half in range(_HALVES)]
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA) + tile * _KEYS
            keys_left = share.end_key - tile * _KEYS
            is_newest = is_new & (keys_left <= _KEYS)
            k_tile, v_tile = scratch.kernel.at[k_stage], scratch.kernel.at[v_stage]
            plgpu.barrier_wait(scratch.keys_full.at[k_stage])

            @pl.when(is_newest)
            def put_key():
                put_row(k_tile, keys_left - 1, scratch.new.at[0])
                plgpu.commit_smem()

            def scores(ref):
                for number, half in enumerate(halves):
                    q = scratch.q.at[:, pl.ds(number * WGMMA_ROWS, WGMMA_ROWS)]
                    plgpu.wgmma(ref, k_tile.at[half], q.transpose((1, 0)))
                return ref[...]

            s = pl.run_scoped(scores, tiles.accumulator(*shape))
            plgpu.barrier_arrive(scratch.empty.at[k_stage])
            s = jnp.where(key < share.end_key, base2_logits(s, self.spec), -jnp.inf)
            m_new = jnp.maximum(m_i, s.max(axis=0))
            shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
            p = jnp.exp2(s - _spread(shift, shape))
            alpha = jnp.exp2(m_i - shift)
            scratch.p.transpose((1, 0))[...] = p.astype(scratch.p.dtype)
            plgpu.commit_smem()
            l_i = l_i * _spread(alpha, shape) + p
            plgpu.barrier_wait(scratch.keys_full.at[v_stage])

            @pl.when(keys_left <= _KEYS)
            def finish_values():
                clear_rows(v_tile, keys_left)
                pl.when(is_newest)(lambda: put_row(v_tile, keys_left - 1, scratch.new.at[1]))
                plgpu.commit_smem()

            probabilities = scratch.p.transpose((1, 0))
            new = []
            for half, acc in zip(halves, accs, strict=True):
                values = v_tile.at[half].transpose((1, 0))
                new.append(tiles.accumulate(acc * _spread(alpha, acc.shape), values, probabilities))
            plgpu.barrier_arrive(scratch.empty.at[v_stage])
            return new, m_new, l_i

        zeros = [plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, TILED_ROWS), jnp.float32), _WGMMA) for _ in range(_HALVES)]
        least = plgpu.layout_cast(jnp.full((TILED_ROWS,), -jnp.inf, jnp.float32), _OF_ROWS)
        start = zeros, least, plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _WGMMA)
        accs, m_i, l_i = lax.fori_loop(share.first, share.end, attend_tile, start)
        l_i, empty = l_i.sum(axis=0), m_i == -jnp.inf
        safe_l_i = jnp.where(empty, 1.0, l_i)
        outs = [acc / _spread(safe_l_i, acc.shape) for acc in accs]
        return outs, jnp.where(empty, -jnp.inf, m_i + jnp.log2(safe_l_i))


def _spread(of_rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(of_rows, shape, [1])


def fits(call: AttentionCall, depth: int) -> bool:
    """Whether the phase serves a call, before a product of so many inputs."""
    spec = call.spec
    plain = AttentionSpec(
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        sm_scale=spec.sm_scale,
        page_layout=spec.page_layout,
    )
    return (
        call.operation == "paged_decode"
        and call.num_seqs == 1
        and call.num_tokens == 1
        and call.kv_dtype == call.q_dtype
        and call.features <= {"layer_index", "head_norms"}
        and dataclasses.replace(spec, v_head_dim=None) == plain
        and spec.value_dim == spec.head_dim == DEPTH
        and spec.group_size <= TILED_ROWS <= spec.group_size + 2 * spec.num_kv_heads
        and spec.num_q_heads % 4 == 0  # what is polled lies at multiples of 16 bytes
        and depth == spec.num_q_heads * DEPTH
        and call.page_size is not None
        and (_KEYS % call.page_size == 0 or call.page_size % _KEYS == 0)
        and call.page_size % TILED_ROWS == 0
        and tiles.num_sms() >= spec.num_kv_heads
    )
