"""The kernel of extend on Hopper: ragged queries over keys, two warpgroups that take turns at the tensor core.

grid (blocks)             as many as the GPU has SMs; each takes every blocks-th unit of work, the longest first
  a unit                  an item of the schedule (up to `block_tokens` tokens of one request) and a block of heads
  memory warpgroup        TMA: the next unit's q, then k and v a tile of `block_kv` keys at a time, some tiles ahead
  compute warpgroups      64 rows each: S = q k^T, online softmax in base 2, acc += P v; then acc / sum and lse out
  q_full, q_free          memory -> compute, and back: a warpgroup's q has arrived; is in the form that wgmma reads
  k_full, v_full          memory -> compute: the copies of a tile have arrived, and v holds nothing but the request's
  k_free, v_free          both compute -> memory: the tile may be overwritten
  turn                    compute <-> compute: while one multiplies, the other does its softmax
  readying warpgroup      only where numbers are fp8 or keys are turned: between memory and compute, `extend_ready`
shared memory: q of both as it arrives and as wgmma reads it, tiles of k and of v; the output takes q's place

A tile's 64 rows are some heads of one group times as many tokens as fit, head by head: so a prompt reads its prefix
once a kv head even if it has only a few tokens, and the warpgroups of a long one see nearly the same keys. Requests
begin at any token, while wgmma's tiles are made of 8 rows: queries and results pass through untiled staging memory,
where any row may begin, rather than through copies in XLA, which would read and write all of q and out once more.

Of a request's tiles of keys a unit reads those that some row of it sees, and a warpgroup skips what no row of its own
sees. Only tiles that some of its rows do not see whole are masked; where neither window nor chunk, mask nor position
is given, one number a unit tells which.

fp8 keys are multiplied as they are, with queries that are sums of such numbers; fp8 values are widened to float16,
which holds them exactly, and so are keys that are turned. Features that a call does not use leave nothing in its
kernel.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.logits import LOG2E
from jattn_kernels.mosaic.sm90.common.row_copies import RowCopies
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS, PageCopies
from jattn_kernels.mosaic.sm90.extend.converter import ExtendReady
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendFormats
from jattn_kernels.mosaic.sm90.extend.producer import ExtendMemory
from jattn_kernels.mosaic.sm90.extend.rows import COMPUTE_WARPGROUPS
from jattn_kernels.mosaic.sm90.extend.schedule import (
    ExtendTiles,
    heads_per_tile,
    staged_pieces,
)
from jattn_kernels.mosaic.sm90.extend.shared_memory import ExtendScratch, extend_scratch
from jattn_kernels.mosaic.sm90.extend.work_tile import Operands, TilePair, TileRows, Tiles, Unit
from jattn_kernels.spec import AttentionSpec

_MEMORY, _READYING = COMPUTE_WARPGROUPS, COMPUTE_WARPGROUPS + 1  # numbers of warpgroups


class _Registers(NamedTuple):
    """Of a thread of each warpgroup; those of all threads of a block are 65,536 at most."""

    compute: int
    memory: int
    readying: int = 0


def _registers(formats: ExtendFormats) -> _Registers:
    if not formats.readies:
        return _Registers(compute=232, memory=40)
    if not formats.turns:
        return _Registers(compute=208, memory=24, readying=72)
    return _Registers(compute=192, memory=24, readying=104)


@dataclasses.dataclass(frozen=True)
class ExtendKernel:
    """The kernel of one configuration.

    Attributes:
        copies: Of a tile of keys or values.
        formats: Dtypes.
    """

    spec: AttentionSpec
    sizes: ExtendTiles
    copies: PageCopies | RowCopies
    formats: ExtendFormats

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
        most = 128 if self.formats.readies and self.spec.value_dim > 192 else self.spec.value_dim
        return [pl.ds(column, most) for column in range(0, self.spec.value_dim, most)]

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
        run = launch.kernel(
            functools.partial(self._entry, tree),
            out_type=[
                jax.ShapeDtypeStruct((*operands.q.shape[:2], self.spec.value_dim), self.formats.out),
                jax.ShapeDtypeStruct((num_items, self.head_blocks, COMPUTE_WARPGROUPS, WGMMA_ROWS), jnp.float32),
            ],
            grid=(self.blocks(num_items),),
            grid_names=("block",),
            num_threads=_READYING + 1 if self.formats.readies else _MEMORY + 1,
            kernel_name="paged_extend",
        )
        return run(*leaves)

    def _entry(self, tree, *refs):
        operands, out_refs = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves :]
        pl.run_scoped(
            functools.partial(self._body, operands, out_refs),
            extend_scratch(self.spec, self.sizes, self.formats, copies=self.copies.copies, heads=self.heads),
            collective_axes="warpgroup",
        )

    def _body(self, operands: Operands, out_refs, scratch: ExtendScratch):
        items_ref, (out_ref, lse_ref) = operands.items, out_refs
        (q_smem, out_smem), q_staging, p_smem, turn = scratch.q_and_out, scratch.q_staging, scratch.p, scratch.turn
        ready = TilePair(*map(_over, scratch.readied, scratch.copied))
        registers = _registers(self.formats)
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

        @pl.when(warpgroup == _MEMORY)
        def memory():
            plgpu.set_max_registers(registers.memory, action="decrease")
            memory = ExtendMemory(
                self.spec,
                self.sizes,
                self.copies,
                self.heads,
                self.tile_tokens,
                operands,
                q_staging,
                scratch.q_full,
                scratch.q_free,
                scratch.copied,
                scratch.last_v_full,
            )
            memory.run(unit, rounds)

        if self.formats.readies:

            @pl.when(warpgroup == _READYING)
            def readying():
                plgpu.set_max_registers(registers.readying, action="decrease")
                ExtendReady(self.formats, operands, scratch.copied, ready).run(unit, rounds)

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def compute():
            plgpu.set_max_registers(registers.compute, action="increase")
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
                arrived, taken = scratch.q_full.at[warpgroup], scratch.q_free.at[warpgroup]
                self._take_queries(own_staging, own_q, arrived, taken, rows)
                pl.when(warpgroup == 1)(lambda: self._pass(turn))
                acc, top, total = self._attend(own_q, ready, own_p, turn, now, rows, begun)
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
                    outs = [(part * _spread(share, part)).astype(self.formats.out) for part in acc]
                    self._store_rows(outs, out_ref, now.first + skipped, tokens, now.heads * self.heads, own_out)

                return begun + now.end_tile, following

            lax.fori_loop(0, rounds, attend_unit, (jnp.int32(0), unit(0)))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _take_queries(self, staging, q_smem, q_full, q_free, rows):
        """Rows of a tile into the form that wgmma reads."""
        width = staging.shape[-1]
        layout = plgpu.Layout.WGMMA_UPCAST_2X if self.formats.q.itemsize == 1 else plgpu.Layout.WGMMA
        for column in staged_pieces(self.formats.query_columns(self.spec.head_dim), width):
            plgpu.barrier_wait(q_full)
            q = plgpu.load(staging, layout=layout, optimized=False)
            plgpu.wait_smem_to_gmem(0)  # the last unit's output lies where q goes
            # Where only a scale makes logits of products, the largest is taken before it scales.
            q_smem[:, pl.ds(column, width)] = -q if rows.is_negated else q
            plgpu.commit_smem()
            plgpu.barrier_arrive(q_free)

    def _store_rows(self, outs, out_ref, first, tokens, head, staging):
        """The first `tokens` tokens of each head: those behind them belong to another block."""
        width = staging.shape[-1]
        for column in staged_pieces(self.spec.value_dim, width):
            out, begin = outs[column // outs[0].shape[1]], column % outs[0].shape[1]
            part = lax.slice(out, (0, begin), (WGMMA_ROWS, begin + width)) if out.shape[1] > width else out
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

    def _attend(self, q_smem, ready, p_smem, turn, unit, rows, begun):
        """Unnormalised output, largest scaled score (base 2) and sum of each row."""
        keys, values = ready
        block_kv, head_dim = self.sizes.block_kv, self.spec.head_dim
        factor, only_scaled = rows.scale, rows.only_scaled
        per_row = plgpu.Layout.WGMMA.reduce(1)
        spans = rows.spans()

        def wait_for_k(tile, end):
            pl.when(tile < end)(lambda: plgpu.barrier_wait(keys.full.at[keys.stage(begun + tile)]))

        def attend_tile(tile, carry, masked):
            acc, top, total = carry
            k_stage, v_stage = keys.stage(begun + tile), values.stage(begun + tile)
            mask = rows.mask_words(tile)

            def scores(ref):
                for part in range(self.formats.q_parts):
                    q = q_smem if q_smem.shape[-1] == head_dim else q_smem.at[:, pl.ds(part * head_dim, head_dim)]
                    plgpu.wgmma(ref, q, keys.smem.at[k_stage].transpose((1, 0)))
                self._pass(turn)
                return ref[...]

            s = pl.run_scoped(scores, tiles.accumulator(WGMMA_ROWS, block_kv))
            plgpu.barrier_arrive(keys.free.at[k_stage])
            if masked or not only_scaled:
                seen = rows.visible(tile, mask) if masked else None
                s = s * rows.spread(factor) if only_scaled else rows.logits(s, tile)
                s = s if seen is None else jnp.where(seen, s, -jnp.inf)
                new_top = jnp.maximum(top, s.max(axis=1))
                shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                p = jnp.exp2(s - lax.broadcast_in_dim(shift, s.shape, [0]))
            else:
                new_top = shift = jnp.maximum(top, s.max(axis=1) * factor)
                p = jnp.exp2(
                    s * rows.spread(factor) - lax.broadcast_in_dim(shift, s.shape, [0])
                )  # one fused multiply-add each
            keep = jnp.exp2(top - shift)
            acc = [part * _spread(keep, part) for part in acc]
            total = total * keep
            probabilities = p.astype(self.formats.product)
            if self.spec.value_dim <= 128:
                total = total + p.sum(axis=1)
                acc, total, new_top, probabilities = lax.optimization_barrier((acc, total, new_top, probabilities))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(values.full.at[v_stage])
            plgpu.barrier_wait(turn)
            if self.spec.value_dim > 128:
                total = total + p.sum(axis=1)
            next_k = functools.partial(wait_for_k, tile + 1, spans[-1][1])
            v_smem, products = values.smem.at[v_stage], []
            for part, columns in zip(acc, self.value_parts, strict=True):
                v = v_smem.at[:, columns] if len(acc) > 1 else v_smem
                last = len(products) + 1 == len(acc)
                products.append(tiles.add_product(part, probabilities, v, p_smem, next_k if last else lambda: None))
            plgpu.barrier_arrive(values.free.at[v_stage])
            return products, new_top, total

        def skip_tile(tile):
            """Keeps the others' time: the memory and the other warpgroup still have this tile to do."""
            for each in ready:
                stage = each.stage(begun + tile)
                plgpu.barrier_wait(each.full.at[stage])
                plgpu.barrier_arrive(each.free.at[stage])
                self._pass(turn)

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

    def _kv_head(self, unit):
        return unit.kv_head(self.spec, self.heads)

    def _pass(self, turn):
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)


def _spread(of_rows: jax.Array, part: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(of_rows, part.shape, [0])


def _over(own: Tiles, other: Tiles) -> Tiles:
    """Tiles of which what is None is the other's."""
    return Tiles(*(theirs if part is None else part for part, theirs in zip(own, other, strict=True)))
