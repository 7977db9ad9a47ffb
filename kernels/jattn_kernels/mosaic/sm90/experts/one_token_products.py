"""Both products of one token's mixture: units are 64 hidden units of an expert, then 64 columns of its result."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.call import ExpertsCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.arrivals import Sums, never_zero
from jattn_kernels.mosaic.sm90.common.product_tiles import summed_over_stages
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_hidden import CountedHidden, ToldHidden, told_width
from jattn_kernels.mosaic.sm90.experts.one_token_shared import SharedUnits, SharesOfHidden
from jattn_kernels.mosaic.sm90.experts.one_token_stages import (
    DEPTH,
    Ring,
    Scratch,
    of_row,
    store_row,
)

# Of what adds up to the result: those after the first are 0. In the second, blocks of the kernel that reads it may
# leave each other what it begins with, in the third what its experts return, from the fourth on their hidden units, and
# in those after the fourth what splits of attention are, if there are any; those over latent rows are behind all these.
ROW_OF_HIDDEN, ROWS_OF_EXPERTS = 3, 4
ROWS_LEFT = ROWS_OF_EXPERTS + 9
MOST_DEPTH = 2432  # of all products: rows of so many numbers fit beside the stages, a token's sum and 512 experts
_THREADS, _VECTOR = 128, 4  # numbers that a thread stores at once
_PAIR = 2  # the gate's columns and the other half's


@dataclasses.dataclass(frozen=True)
class ExpertPhases:
    """The phases after the choice.

    Attributes:
        per_token: Experts.
        units: Hidden units of an expert.
        columns: Of the token.
        shared: Numbers of the experts that are not chosen; the first of those `per_token`.
        rows_of_hidden: In which hidden units of an expert can be left.
        rows_left: Of each part of the result, all but the first of which are 0.
    """

    per_token: int
    units: int
    columns: int
    activation: Callable[[Any, Any], Any]
    shared: range = range(0)
    rows_of_hidden: int = 1
    rows_left: int = ROWS_LEFT

    @classmethod
    def of(cls, call: ExpertsCall) -> "ExpertPhases":
        """Those of a call."""
        routing = call.routing
        shared = range(0) if routing is None else range(routing.num_experts, routing.all_experts)
        phases = cls(call.per_token, call.units, call.hidden_size, call.activation, shared)
        if call.router is None or phases._most_choices > 1:
            return phases
        attention, rows = call.router.attention, min(call.router.left[1], ROWS_LEFT) - ROW_OF_HIDDEN
        if attention is not None and attention.operation != "mla_decode":
            return phases
        return dataclasses.replace(phases, rows_of_hidden=rows)

    @property
    def num_parts(self) -> int:
        """Of the result."""
        return self.per_token

    @property
    def hidden_blocks(self) -> int:
        """Blocks of hidden units of all experts."""
        return self.per_token * (self.units // WGMMA_ROWS)

    @property
    def column_blocks(self) -> int:
        """Blocks of columns of what all experts return."""
        return self.per_token * (self.columns // WGMMA_ROWS)

    @property
    def most_units(self) -> int:
        """Of the second product, of a block."""
        return pl.cdiv(self.column_blocks, tiles.num_sms())

    @property
    def _of_neighbours(self) -> bool:
        """Whether a block's units of the second product are neighbours, of one choice: there is no room for more."""
        of_choice = self.columns // WGMMA_ROWS
        return told_width(self.units, self.most_units) > MOST_DEPTH and of_choice % self.most_units == 0

    @property
    def _summed(self) -> int:
        """Units of the second product that a block adds up: of one block of columns, as many for each."""
        is_even = self.per_token % self.most_units == 0 and not self._of_neighbours
        return self.most_units if is_even else 1

    @property
    def num_sums(self) -> int:
        """Parts of the result that are not 0, the first ones."""
        return self.per_token // self._summed

    @property
    def _most_choices(self) -> int:
        """That a block's units of the second product are of."""
        return 1 if self._of_neighbours else self.most_units

    @property
    def told_width(self) -> int:
        """Numbers of hidden units that tell by themselves, of a block's units."""
        return told_width(self.units, self._most_choices)

    @property
    def shared_units(self) -> SharedUnits:
        """Those of the experts that are not chosen."""
        most = SharedUnits.most(self.rows_of_hidden)
        return SharedUnits.of_a_share_each(len(self.shared), self.units, self.columns, most)

    def told_hidden(self, ref: Any, begin: int, stride: int, row: int, dtype: Any) -> ToldHidden:
        """Hidden units in memory from a flat place on, with strides from one choice, or its row, to the next."""
        shares, units = self.shared_units.shares, self.units
        shared = None
        if self.shared and shares > 1:
            shared = SharesOfHidden(ref, begin, stride, row, units, shares, self.activation)
        return ToldHidden(Sums(ref, begin, stride, 1), units, self._most_choices, dtype, shared, len(self.shared))

    def _count(self, of_second: bool) -> Any:
        """The block's units of a product."""
        units = self.column_blocks if of_second else self.hidden_blocks
        if of_second and (self._of_neighbours or self._summed > 1):
            return jnp.clip(units - self._begin(True) * self.most_units, 0, self.most_units)
        return lax.div(units - self._begin(of_second) + tiles.num_sms() - 1, tiles.num_sms())

    def _begin(self, of_second: bool) -> Any:
        """The block's first unit: of the second product those have the first that have fewer of the first."""
        own, sms = lax.axis_index("block"), tiles.num_sms()
        return lax.rem(own + (sms - self.hidden_blocks % sms), sms) if of_second else own

    def _unit(self, of_second: bool, number: Any) -> tuple[Any, Any]:
        """The choice and the block of columns of the block's n-th unit."""
        blocks = (self.columns if of_second else self.units) // WGMMA_ROWS
        if of_second and self._summed > 1:
            unit = self._begin(True) * self.most_units + number
            return lax.rem(unit, self.per_token), lax.div(unit, self.per_token)
        if of_second and self._of_neighbours:
            unit = self._begin(True) * self.most_units + number
        else:
            unit = self._begin(of_second) + number * tiles.num_sms()
        return lax.div(unit, blocks), lax.rem(unit, blocks)

    def _for_each(self, of_second: bool, visit: Callable[[Any, Any, Any], Any], start: Any) -> Any:
        """Calls `visit(choice, block of columns, carry)` for each unit of the block's; the last carry.

        Of the first product without those of experts that are not chosen, which come first.
        """

        def step(number, carry):
            return visit(*self._unit(of_second, number), carry)

        first = 0
        if self.shared and not of_second:
            units, own, sms = len(self.shared) * (self.units // WGMMA_ROWS), lax.axis_index("block"), tiles.num_sms()
            first = jnp.maximum(lax.div(units - own + sms - 1, sms), 0)
        return lax.fori_loop(first, self._count(of_second), step, start)

    def produce_shared(self, operands: Any, scratch: Scratch, ring: Ring, done: Any) -> Any:
        """Asks for weights of the first product of experts that are not chosen, before the others are known."""

        layer = operands.layer[0]

        def copy_share(choice, block, share, first, steps, before):
            del share
            weights = operands.gate_up.at[layer, self.shared.start + choice]

            def copy_step(k, done):
                return self._copy_pair(weights, scratch, ring, block, first + k, done)

            lax.fori_loop(0, steps, copy_step, done + before * _PAIR)

        return done + self.shared_units.for_each(copy_share) * _PAIR

    def produce_first(self, operands: Any, scratch: Scratch, ring: Ring, done: Any) -> Any:
        """Asks for weights of the others."""
        layer = operands.layer[0]

        def copy_unit(choice, block, done):
            weights = operands.gate_up.at[layer, scratch.experts[choice, 0]]

            def copy_step(k, done):
                return self._copy_pair(weights, scratch, ring, block, k, done)

            return lax.fori_loop(0, self.columns // DEPTH, copy_step, done)

        return self._for_each(False, copy_unit, done)

    def _copy_pair(self, weights: Any, scratch: Scratch, ring: Ring, block: Any, k: Any, done: Any) -> Any:
        """The k-th stages of both halves of a block of an expert's hidden units."""
        for part in range(_PAIR):
            columns = pl.ds(part * self.units + block * WGMMA_ROWS, WGMMA_ROWS)
            done = ring.copy(weights.at[pl.ds(k * DEPTH, DEPTH), columns], scratch, done)
        return done

    def produce_second(self, operands: Any, scratch: Scratch, ring: Ring, done: Any) -> Any:
        layer = operands.layer[0]

        def copy_unit(choice, block, done):
            expert, columns = scratch.experts[choice, 0], pl.ds(block * WGMMA_ROWS, WGMMA_ROWS)

            def copy_step(k, done):
                weights = operands.down.at[layer, expert, pl.ds(k * DEPTH, DEPTH), columns]
                return ring.copy(weights, scratch, done)

            return lax.fori_loop(0, self.units // DEPTH, copy_step, done)

        return self._for_each(True, copy_unit, done)

    def consume_shared(self, hidden: CountedHidden | ToldHidden, scratch: Scratch, ring: Ring, done: Any) -> Any:
        """Stores the block's share of hidden units, as `produce_shared` has them."""

        def multiply_share(choice, block, share, first, steps, before):
            halves = self._halves(scratch, ring, done + before * _PAIR, first, steps)
            if isinstance(hidden, ToldHidden) and hidden.shared is not None:
                hidden.shared.store(choice, block, share, halves)
            else:
                hidden.store(choice, block, self.activation(*halves))

        return done + self.shared_units.for_each(multiply_share) * _PAIR

    def consume_first(self, hidden: CountedHidden | ToldHidden, scratch: Scratch, ring: Ring, done: Any) -> Any:
        """Stores the block's hidden units, as `produce_first` has them."""
        steps = self.columns // DEPTH

        def multiply_unit(choice, block, done):
            hidden.store(choice, block, self.activation(*self._halves(scratch, ring, done, 0, steps)))
            return done + steps * _PAIR

        return self._for_each(False, multiply_unit, done)

    def _halves(self, scratch: Scratch, ring: Ring, done: Any, first: Any, steps: Any) -> list[jax.Array]:
        """Both halves' sums of so many steps of the token's depth, from one on."""

        def product(*sums):
            @pl.loop(0, steps)
            def multiply_step(k):
                x = scratch.x.at[:, pl.ds((first + k) * DEPTH, DEPTH)].transpose((1, 0))
                for part, acc in enumerate(sums):
                    stage = lax.rem(done + k * _PAIR + part, ring.stages)
                    plgpu.barrier_wait(scratch.full.at[stage])
                    plgpu.wgmma(acc, scratch.kernel.at[stage].transpose((1, 0)), x)
                plgpu.wgmma_wait(_PAIR)  # those of the last step are done

                @pl.when(k > 0)
                def free():
                    for part in range(_PAIR):
                        plgpu.barrier_arrive(scratch.empty.at[lax.rem(done + (k - 1) * _PAIR + part, ring.stages)])

            return [acc[...] for acc in sums]

        results = pl.run_scoped(product, *(tiles.accumulator(WGMMA_ROWS, TILED_ROWS) for _ in range(_PAIR)))
        for part in range(_PAIR):
            plgpu.barrier_arrive(scratch.empty.at[lax.rem(done + (steps - 1) * _PAIR + part, ring.stages)])
        return results

    def clear(self, parts: Any) -> None:
        """Stores the block's share of the zeros below what experts return, and of those in parts that nothing is in."""
        below, own, sms = self.rows_left - 1, lax.axis_index("block"), tiles.num_sms()
        vector = math.gcd(self.columns // _THREADS, _VECTOR)
        zeros = plgpu.layout_cast(
            jnp.zeros((self.columns,), parts.dtype), plgpu.Layout.WG_STRIDED((self.columns,), vec_size=vector)
        )

        @pl.loop(0, lax.div(self.per_token * below - own + sms - 1, sms))
        def clear_row(i):
            number = own + i * sms
            parts[lax.div(number, below), 1 + lax.rem(number, below)] = zeros

        if self.num_sums < self.per_token:

            @pl.when(own < self.per_token - self.num_sums)
            def clear_part():
                parts[self.num_sums + own, 0] = zeros

    def consume_second(
        self,
        hidden: CountedHidden | ToldHidden,
        parts: Any,
        returned: Sums | None,
        scratch: Scratch,
        ring: Ring,
        done: Any,
        *,
        dtype: Any,
    ) -> Any:
        """Stores what the block's columns of each expert are, times its weight.

        Args:
            returned: Where blocks find the same, if they wait for it.
            dtype: To which what an expert returns is rounded.
        """
        hidden.bring(scratch, lambda number: jnp.minimum(self._unit(True, number)[0], self.per_token - 1))
        steps = self.units // DEPTH

        def store(part, block, result, row):
            place = part * self.rows_left * self.columns + block * WGMMA_ROWS
            store_row(parts, place, result, row)
            if returned is not None:
                own = returned.begin + part * returned.stride + block * WGMMA_ROWS
                store_row(returned.ref, own, never_zero(result), row)

        def multiply_unit(number, carry):
            done, *total = carry
            choice, block = self._unit(True, number)
            rows, row = hidden.of_unit(scratch, number, choice)

            def multiply(acc, stage, k):
                x = rows.at[:, pl.ds(k * DEPTH, DEPTH)]
                plgpu.wgmma(acc, scratch.kernel.at[stage].transpose((1, 0)), x.transpose((1, 0)))

            shape = WGMMA_ROWS, TILED_ROWS
            result = summed_over_stages(multiply, scratch, done, steps, stages=ring.stages, shape=shape)
            result = result.astype(dtype).astype(jnp.float32)
            if total and isinstance(hidden, CountedHidden):  # each choice has a row of its own
                result = of_row(result, row)
            result *= scratch.weights[choice, 0]
            if not total:
                store(choice, block, result, row)
                return (done + steps,)
            return done + steps, total[0] + result

        count = self._count(True)
        if self._summed == 1:
            return lax.fori_loop(0, count, multiply_unit, (done,))[0]
        none = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, TILED_ROWS), jnp.float32), plgpu.Layout.WGMMA)
        done, total = lax.fori_loop(0, count, multiply_unit, (done, none))
        choice, block = self._unit(True, 0)
        pl.when(count > 0)(lambda: store(lax.div(choice, self._summed), block, total, 0))
        return done
