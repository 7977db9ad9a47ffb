"""Values of heads from attention over latent rows that was split over the blocks, for the product that follows.

A unit is a head and 64 of the compressed numbers: a block merges what splits found of them, multiplies them with the
head's projection of values, and leaves the product; whoever needs a head adds up its units.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.arrivals import Sums, arrived, never_zero
from jattn_kernels.mosaic.sm90.common.tile_stores import constant, divided, store_registers
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_attention import SplitRoom
from jattn_kernels.mosaic.sm90.experts.one_token_latents import MOST_SPLITS, LatentPhase
from jattn_kernels.mosaic.sm90.experts.one_token_merge import BY_HEADS, merged_width, store_heads
from jattn_kernels.mosaic.sm90.experts.one_token_stages import DEPTH, Ring, Scratch, store_row

_HALVES = DEPTH // WGMMA_ROWS  # of a head's values
_WGMMA, _OF_COLUMNS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)
_OF_SPLITS = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class ValuePhase:
    """The phase between attention and the product that is added last.

    Attributes:
        attention: The one before.
    """

    attention: LatentPhase

    @property
    def chunks(self) -> int:
        """Of a head: what the blocks' products of it add up to."""
        return self.attention.compressed // WGMMA_ROWS

    @property
    def depth(self) -> int:
        """Numbers of all heads' values."""
        return self.attention.spec.num_q_heads * DEPTH

    @property
    def units(self) -> int:
        return self.attention.spec.num_q_heads * self.chunks

    def _own(self) -> tuple[Any, Any]:
        """The block's head and chunk."""
        block = lax.axis_index("block")
        return lax.div(block, self.chunks), lax.rem(block, self.chunks)

    def produce(self, operands: Any, scratch: Scratch, done: Any) -> Any:
        """Asks for the block's weights, if it has a unit."""
        head, chunk = self._own()
        has_unit = lax.axis_index("block") < self.units

        @pl.when(has_unit)
        def copy():
            columns = pl.ds(chunk * WGMMA_ROWS, WGMMA_ROWS)
            weights = operands.values.at[operands.values_layer[0], head, :, columns]
            Ring().copy(weights, scratch, done)

        return done + has_unit.astype(jnp.int32)

    def consume(self, operands: Any, room: SplitRoom, values: Sums, scratch: Scratch, done: Any) -> Any:
        """Stores the block's unit."""
        head, chunk = self._own()
        has_unit = lax.axis_index("block") < self.units

        @pl.when(has_unit)
        def multiply():
            merged = self._merged(operands, room, head, chunk)
            _store_chunk(scratch.x.at[:, pl.ds(0, WGMMA_ROWS)], merged.astype(scratch.x.dtype))
            plgpu.commit_smem()
            stage = lax.rem(done, scratch.kernel.shape[0])
            plgpu.barrier_wait(scratch.full.at[stage])

            def product(*sums):
                x = scratch.x.at[:, pl.ds(0, WGMMA_ROWS)].transpose((1, 0))
                for half, ref in enumerate(sums):
                    plgpu.wgmma(ref, scratch.kernel.at[stage, pl.ds(half * WGMMA_ROWS, WGMMA_ROWS)], x)
                return [ref[...] for ref in sums]

            found = pl.run_scoped(product, *(tiles.accumulator(WGMMA_ROWS, TILED_ROWS) for _ in range(_HALVES)))
            plgpu.barrier_arrive(scratch.empty.at[stage])
            for half, sums in enumerate(found):
                place = values.begin + chunk * values.stride + head * DEPTH + half * WGMMA_ROWS
                store_row(values.ref, place, never_zero(sums), 0)

        return done + has_unit.astype(jnp.int32)

    def _merged(self, operands: Any, room: SplitRoom, head: Any, chunk: Any) -> jax.Array:
        """What splits' means of a chunk add up to, each with its weight."""
        phase, shape = self.attention, (MOST_SPLITS, WGMMA_ROWS)
        busy = phase.share(operands.seq_lens[0], 0).busy
        row, column = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_WGMMA) for axis in range(2))
        split = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=_OF_SPLITS)
        of_outs = room.of(jnp.minimum(row, busy - 1), phase.record)
        of_outs = of_outs + (head * phase.compressed + chunk * WGMMA_ROWS + column)
        of_sums = room.of(jnp.minimum(split, busy - 1), phase.record)
        of_sums = of_sums + (phase.spec.num_q_heads * phase.compressed + head)
        outs, sums = arrived(room.ref, [of_outs, of_sums], [_WGMMA, _OF_SPLITS])
        sums = jnp.where(split < busy, sums, -jnp.inf)
        most = sums.max()
        weights = jnp.exp2(sums - jnp.where(most == -jnp.inf, 0.0, most))
        total = weights.sum()
        return (outs * lax.broadcast_in_dim(weights, shape, [0])).sum(axis=0) * (
            1.0 / jnp.where(total == 0, 1.0, total)
        )

    def bring(self, target: Any, values: Sums, first_head: Any, heads: int) -> None:
        """The first row of `target`: so many heads' values, from one on; wgmma then sees it.

        Args:
            target: (8, `merged_width`), tiled; its other rows stay as they are.
            heads: Past the last head that one is taken again.
        """
        shape = merged_width(heads) // DEPTH, DEPTH
        head, column = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=BY_HEADS) for axis in range(2))
        head = jnp.minimum(head + first_head, self.attention.spec.num_q_heads - 1)
        places = [values.begin + chunk * values.stride + head * DEPTH + column for chunk in range(self.chunks)]
        parts = arrived(values.ref, places, [BY_HEADS] * self.chunks)
        store_heads(target, functools.reduce(operator.add, parts).astype(target.dtype))
        plgpu.commit_smem()


def _store_chunk(target: Any, values: jax.Array) -> None:
    """target[0] = values, all of which each warp has: no number of a tile's first row is moved by swizzling."""
    if tiles.interpret_params() is not None:
        target[0] = values
        return

    def places(thread: Any) -> Any:
        in_four = arith.muli(divided(thread, 4)[1], constant(2))

        def place(i: int) -> Any:
            return arith.addi(in_four, constant(i * TILED_ROWS))

        return place

    store_registers(target, values, _OF_COLUMNS, places)
