"""Both products of one token's mixture in mxfp4: who copies, who multiplies, and what their sums become.

first product             units of 32 hidden units of an expert, of its gate and its other half; every n-th of a block
second product            units of 64 columns of what an expert returns, of half of the depth; a block has neighbours
a producer warp           TMA: weights and their scales, stages ahead, from one product into the next
consumer warpgroups       every n-th stage each: weights made float16 in registers, a product a group, times its scale
rows' warpgroup           the token in float16, then hidden units of the experts that the block's units are of; and
                          what the consumers' sums make: biases, activation, weights, the way out
full, empty               of stages, as in `few_rows`
rows_full                 rows' warpgroup -> consumers: a product's rows are there
summed, free              consumers -> rows' warpgroup: a unit's sums are there; back: others may be put there
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.columns import no_columns, put_columns
from jattn_kernels.mosaic.sm90.common.product_tiles import wait_for_last
from jattn_kernels.mosaic.sm90.common.row_pieces import pieces
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.e2m1_products import stage_added, store_sums
from jattn_kernels.mosaic.sm90.experts.few_rows_sizes import FewRowsSizes
from jattn_kernels.mosaic.sm90.experts.float16_rows import put_numbers_in_float16
from jattn_kernels.mosaic.sm90.experts.one_token_result import hidden_units, returned_columns
from jattn_kernels.mosaic.sm90.experts.one_token_units import HALVES, OneTokenUnits
from jattn_kernels.mxfp4 import GROUP
from jattn_kernels.quantized import MXFP4, NUMBERS_OF_BYTE
from jattn_kernels.routing_spec import Routing

HALF = WGMMA_ROWS // HALVES
_PRODUCTS = 2


class FewBitsScratch(NamedTuple):
    kernel: Any  # (stages, 1, 2, 32, bytes)
    scales: Any  # (stages, groups and those left free, 2, 32)
    x: Any  # (rows, K / 32, 1, 32): the token, and hidden units of experts
    factors: Any  # (rows,)
    sums: Any  # (buffers, consumers, 64, 8 and some left free), in all columns the same
    full: Any
    empty: Any
    rows_full: Any
    summed: Any
    free: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewBitsPhases:
    """Both phases.

    Attributes:
        sizes: Of stages, and who has which registers.
        units: Hidden units of an expert, and columns of the token.
        rows_left: Of each part of the result, all but the first of which are 0.
        first, second: Whether a launch has these products.
    """

    routing: Routing
    sizes: FewRowsSizes
    units: int
    activation: Callable[[Any, Any], Any]
    rows_left: int
    first: bool = True
    second: bool = True

    @property
    def columns(self) -> int:
        """Of the token."""
        return self.units

    @property
    def num_parts(self) -> int:
        """Of the result; in as many the next layer's blocks leave each other an expert's hidden units."""
        return max(self._units.num_parts, self.routing.per_token)

    @property
    def num_hidden(self) -> int:
        """Units of the first product, of all blocks."""
        return self._units.total(False)

    @property
    def _depth(self) -> int:
        """Of a stage."""
        return self.sizes.groups * GROUP

    @property
    def _units(self) -> OneTokenUnits:
        return OneTokenUnits(per_token=self.routing.per_token, hidden=self.units, steps=self.units // self._depth)

    def scratch(self) -> FewBitsScratch:
        """In shared memory."""
        sizes, rows = self.sizes, 1 + self._units.most_rows
        stages: dict[str, Any] = {"num_barriers": sizes.stages}
        buffers: dict[str, Any] = {"num_barriers": sizes.buffers}
        return FewBitsScratch(
            kernel=plgpu.SMEM((sizes.stages, sizes.shares, HALVES, HALF, self._depth // NUMBERS_OF_BYTE), MXFP4),
            scales=plgpu.SMEM((sizes.stages, sizes.rows_of_scales, HALVES, HALF), MXFP4),
            x=plgpu.SMEM((rows, self.units // GROUP, 1, GROUP), jnp.float16),
            factors=plgpu.SMEM((rows,), jnp.float32),
            sums=plgpu.SMEM((sizes.buffers, sizes.consumers, WGMMA_ROWS, sizes.row_sums), jnp.float32),
            full=plgpu.Barrier(num_arrivals=2, **stages),
            empty=plgpu.Barrier(**stages),
            rows_full=plgpu.Barrier(num_barriers=_PRODUCTS),
            summed=plgpu.Barrier(num_arrivals=sizes.consumers, **buffers),
            free=plgpu.Barrier(**buffers),
        )

    def produce(self, weights: Any, scratch: FewBitsScratch, experts: Any) -> None:
        """Asks for all weights of the block's units; by one warp.

        Args:
            experts: (k, 4), in shared memory: those that are chosen.
        """
        stages, groups, width = self.sizes.stages, self.sizes.groups, self._depth // NUMBERS_OF_BYTE

        def copies(of_second: bool, kernel: Any, scales: Any) -> Any:
            def copy_unit(_, choice, block, half, done):
                first, steps = self._units.steps_of(of_second, half)
                expert = self._expert(weights, experts, choice)
                # 32 of the gate's outputs and 32 of the other half's, or 64 that are neighbours.
                columns = (pl.ds(block * HALVES, HALVES),) if of_second else (pl.ds(0, HALVES), block)

                @pl.loop(0, steps)
                def copy_step(k):
                    stage = lax.rem(done + k, stages)
                    pl.when(done + k >= stages)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                    full, inputs = scratch.full.at[stage], pl.ds((first + k) * width, width)
                    of_weights = kernel.at[expert, *columns, pl.ds(0, HALF), inputs]
                    plgpu.copy_gmem_to_smem(of_weights, scratch.kernel.at[stage, 0], full)
                    own, target = pl.ds((first + k) * groups, groups), scratch.scales.at[stage, pl.ds(0, groups)]
                    plgpu.copy_gmem_to_smem(scales.at[expert, own, *columns], target, full)

                return done + steps

            return copy_unit

        done = jnp.int32(0)
        if self.first:
            done = self._units.for_each(False, copies(False, weights.gate_up, weights.gate_up_scales), done)
        if self.second:
            done = self._units.for_each(True, copies(True, weights.down, weights.down_scales), done)
        wait_for_last(scratch.empty, done, stages)

    def multiply(self, scratch: FewBitsScratch, warpgroup: Any) -> None:
        """What a consumer warpgroup does."""
        stages, consumers = self.sizes.stages, self.sizes.consumers
        shape, groups = (WGMMA_ROWS, TILED_ROWS), self.sizes.groups

        def products(of_second: bool, before: Any) -> Any:
            def multiply_unit(number, choice, block, half, done):
                del choice, block
                row = 1 + self._units.row(number) if of_second else 0
                first, steps = self._units.steps_of(of_second, half)
                own = lax.rem(warpgroup + consumers - lax.rem(done, consumers), consumers)

                def multiply_step(i, total):
                    k = own + i * consumers
                    stage = lax.rem(done + k, stages)
                    plgpu.barrier_wait(scratch.full.at[stage])
                    x = scratch.x.at[row, pl.ds((first + k) * groups, groups)]
                    total = stage_added(total, scratch.kernel.at[stage], scratch.scales.at[stage], x, shares=1)
                    plgpu.barrier_arrive(scratch.empty.at[stage])
                    return total

                none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
                total = lax.fori_loop(0, lax.div(steps - own + consumers - 1, consumers), multiply_step, none)
                place = lax.rem(before + number, self.sizes.buffers)
                pl.when(before + number >= self.sizes.buffers)(lambda: plgpu.barrier_wait(scratch.free.at[place]))
                store_sums(total, scratch.sums.at[place, warpgroup])
                plgpu.barrier_arrive(scratch.summed.at[place])
                return done + steps

            return multiply_unit

        done, before = jnp.int32(0), jnp.int32(0)
        if self.first:
            plgpu.barrier_wait(scratch.rows_full.at[0])
            done, before = self._units.for_each(False, products(False, before), done), self._units.count(False)
        if self.second:
            plgpu.barrier_wait(scratch.rows_full.at[1])
            self._units.for_each(True, products(True, before), done)

    def put_token(self, row: list[jax.Array], scratch: FewBitsScratch) -> None:
        """What the first product is of; by the rows' warpgroup, as what follows.

        Args:
            row: Its pieces.
        """
        self._put(row, scratch, 0)
        plgpu.barrier_arrive(scratch.rows_full.at[0])

    def finish_first(self, weights: Any, scratch: FewBitsScratch, experts: Any, hidden: Any) -> None:
        """Stores the block's hidden units.

        Args:
            hidden: Where (`FewBitsHidden`).
        """

        def finish_unit(number, choice, block, half, _):
            del half
            expert, factor = self._expert(weights, experts, choice), scratch.factors[0]
            make = functools.partial(
                hidden_units, weights.gate_up_bias, factor, self.activation, self._units, expert, block
            )
            hidden.store(choice, block * HALF, self._finished(scratch, number, make), HALF)
            hidden.told()
            return 0

        self._units.for_each(False, finish_unit, 0)

    def finish_second(
        self, weights: Any, scratch: FewBitsScratch, experts: Any, factors: Any, hidden: Any, outs: list[Any]
    ) -> None:
        """Brings hidden units, and stores what the block's columns of each expert are, times its weight.

        Args:
            factors: (k, 4), in shared memory: the weights of experts.
            outs: (part, first column, numbers, how many): stores these.
        """
        hidden.wait()
        of_rows = range(self._units.most_rows)
        loaded = [
            [hidden.load(self._units.choice_of_row(row), piece) for piece in pieces(self.units)] for row in of_rows
        ]
        for row, numbers in zip(of_rows, loaded, strict=True):
            self._put(numbers, scratch, 1 + row)
        plgpu.barrier_arrive(scratch.rows_full.at[1])
        before = self._units.count(False) if self.first else 0

        def store(block: Any, part: Any, numbers: jax.Array | None) -> None:
            for out in outs:
                out(part, block * WGMMA_ROWS, numbers, WGMMA_ROWS)

        def finish_unit(number, choice, block, half, total):
            expert = self._expert(weights, experts, choice)
            factor, weight = scratch.factors[1 + self._units.row(number)], factors[choice, 0]
            make = functools.partial(
                returned_columns, weights.down_bias, factor, weight, self._units, expert, block, half
            )
            total += self._finished(scratch, before + number, make)
            part, ends = self._units.part(block), self._units.ends_part(number)
            pl.when(ends)(functools.partial(store, block, part, total))

            @pl.when(self._units.ends_columns(number))
            def store_rest():
                for rest in range(1, self.num_parts):
                    pl.when(rest > part)(functools.partial(store, block, rest, None))

            return total * jnp.where(ends, 0.0, 1.0)

        self._units.for_each(True, finish_unit, no_columns())

    def clear(self, parts: Any) -> None:
        """Stores the block's share of the zeros below what experts return."""
        below, own, sms = self.rows_left - 1, lax.axis_index("block"), tiles.num_sms()

        @pl.loop(0, lax.div(self.num_parts * below - own + sms - 1, sms))
        def clear_row(i):
            number = own + i * sms
            row = parts.at[lax.div(number, below), 1 + lax.rem(number, below)]
            for piece in pieces(self.units):
                piece.of(row)[...] = plgpu.layout_cast(jnp.zeros((piece.size,), parts.dtype), piece.layout)

    def _expert(self, weights: Any, experts: Any, choice: Any) -> Any:
        """Its number among those of all layers."""
        return weights.layer[0] * self.routing.num_experts + experts[choice, 0]

    def _finished(self, scratch: FewBitsScratch, number: Any, make: Callable[[Any], jax.Array]) -> jax.Array:
        """What a unit's sums make, once they are there."""
        total = (self._units.count(False) if self.first else 0) + (self._units.count(True) if self.second else 0)
        place = lax.rem(number, self.sizes.buffers)
        plgpu.barrier_wait(scratch.summed.at[place])
        result = make(scratch.sums.at[place])
        pl.when(number + self.sizes.buffers < total)(lambda: plgpu.barrier_arrive(scratch.free.at[place]))
        return result

    def _put(self, row: list[jax.Array], scratch: FewBitsScratch, number: Any) -> None:
        """A row in float16, and its factor."""
        scratch.factors[number] = put_numbers_in_float16(row, scratch.x.at[number], 0)


class FewBitsHidden(NamedTuple):
    """Hidden units of one token's experts, in rows of the token's dtype, one after the other, that blocks count.

    Attributes:
        ref: (k * units,), in global memory.
        units: Of an expert.
        count: Of the blocks of them that are there.
        blocks: How many there will be.
    """

    ref: Any
    units: int
    count: Any
    blocks: int

    def store(self, choice: Any, column: Any, numbers: jax.Array, side: int) -> None:
        """A unit's, from a column of a choice's on; `told` follows."""
        put_columns(self.ref, choice * self.units + column, numbers.astype(self.ref.dtype), side)

    def told(self) -> None:
        self.count.tell()

    def wait(self) -> None:
        """Until all are there."""
        self.count.wait(self.blocks)

    def load(self, choice: Any, piece: Any) -> jax.Array:
        """A piece of a choice's."""
        return piece.load(self.ref.at[pl.ds(pl.multiple_of(choice * self.units, 64), self.units)])


class ToldFewBitsHidden(NamedTuple):
    """The same in float32, each telling by itself that it is there (`arrivals`).

    Attributes:
        sums: Where they are: of one split, a stride from one choice to the next.
        dtype: To which they are rounded.
    """

    sums: Any
    dtype: Any

    def store(self, choice: Any, column: Any, numbers: jax.Array, side: int) -> None:
        rounded = numbers.astype(self.dtype).astype(jnp.float32)
        place = self.sums.begin + choice * self.sums.stride + column
        put_columns(self.sums.ref, place, rounded, side, told=True)

    def told(self) -> None:
        """Nothing more to do."""

    def wait(self) -> None:
        """Likewise: `load` does."""

    def load(self, choice: Any, piece: Any) -> jax.Array:
        return self.sums.added_up(choice * self.sums.stride + piece.numbers, piece.layout)
