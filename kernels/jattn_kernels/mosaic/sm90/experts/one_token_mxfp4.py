"""The mixture of one token on Hopper in one kernel, of weights in mxfp4: its choice of experts, both of their products.

grid (blocks)             an SM each; takes every n-th of the units: 32 hidden units of an expert, of its gate and its
                          other half. And takes some neighbours of these: 64 columns of what an expert returns, of half
                          of the depth.
  producer warp           TMA: weights and their scales, stages ahead, from one product into the next
  rows' warpgroup         the choice of experts; the token in float16, then its experts' hidden units; and what the
                          consumers' sums make, biases, activation, weights, the way out
  consumer warpgroups     every n-th stage each: weights made float16 in registers, a product a group, times its scale
  chosen                  rows' warpgroup -> producer: the experts are known, in shared memory
  count                   in global memory: of all blocks of hidden units that have been stored. The second product's
                          rows are read when they are all there; its weights are in shared memory by then.
  full, empty, rows_full, summed, free: as in `few_rows`

The hidden units of each expert are a row of the second product's: a unit needs one of them. They lie where the token
did, whose products are all done by then.
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
from jaxtyping import Array, Float, Float32, Int, UInt8

from jattn_kernels.call import ExpertsCall
from jattn_kernels.mosaic.sm90.common import all_blocks, launch, tiles
from jattn_kernels.mosaic.sm90.common.product_tiles import wait_for_last
from jattn_kernels.mosaic.sm90.common.row_pieces import MULTIPLE
from jattn_kernels.mosaic.sm90.common.tiles import WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.choice import chooses
from jattn_kernels.mosaic.sm90.experts.e2m1_products import stage_added, store_sums
from jattn_kernels.mosaic.sm90.experts.few_rows_sizes import FewRowsSizes
from jattn_kernels.mosaic.sm90.experts.float16_rows import put_in_float16
from jattn_kernels.mosaic.sm90.experts.one_token_result import store_hidden, store_returned
from jattn_kernels.mosaic.sm90.experts.one_token_units import HALVES, OneTokenUnits
from jattn_kernels.mosaic.sm90.experts.warp_choice import LANES, by_experts, choose_for_one, of_splits
from jattn_kernels.mxfp4 import GROUP
from jattn_kernels.quantized import MXFP4, NUMBERS_OF_BYTE
from jattn_kernels.routing_spec import Routing

HALF = WGMMA_ROWS // HALVES
_BUFFERS = 2
_MOST_EXPERTS = 512


class OneTokenOperands(NamedTuple):
    """What the kernel reads.

    Attributes:
        x: The token, bfloat16.
        gate_up, gate_up_scales, gate_up_bias: Of all experts of all layers, the gate's outputs and the other half's
            apart, 32 together; biases one after the other.
        down, down_scales, down_bias: Likewise, of one part.
        layer: Which of them.
        hidden: Hidden units of the chosen experts, if another kernel has made them.
    """

    x: Float[Array, "1 D"]
    gate_up: UInt8[Array, "LE 2 blocks 32 bytes"]
    gate_up_scales: UInt8[Array, "LE G 2 blocks 32"]
    gate_up_bias: Float[Array, " LE2U"] | None
    down: UInt8[Array, "LE blocks 32 bytes"]
    down_scales: UInt8[Array, "LE G blocks 32"]
    down_bias: Float[Array, " LED"] | None
    layer: Int[Array, "1"]
    hidden: Float[Array, " kU"] | None = None


class _Scratch(NamedTuple):
    kernel: Any  # (stages, 2, 32, bytes)
    scales: Any  # (stages, groups and those left free, 2, 32)
    x: Any  # (K / 32, 8, 32): the token, then the hidden units of its experts
    factors: Any  # (2, 8)
    sums: Any  # (2, consumers, 64, 8 and some left free)
    scores: Any  # (k, 4)
    weights: Any  # (k, 4)
    experts: Any  # (k, 4)
    full: Any
    empty: Any
    rows_full: Any
    summed: Any
    free: Any
    chosen: Any


def fits(call: ExpertsCall, sizes: FewRowsSizes, *, is_biased: bool) -> bool:
    """Whether the kernel serves a call.

    Args:
        is_biased: Whether there is a bias on the choice.
    """
    routing = call.routing
    if call.num_tokens != 1 or call.weighs_inputs or routing is None or call.hidden_size != call.units or is_biased:
        return False
    if routing.num_experts % LANES or routing.num_experts > _MOST_EXPERTS or routing.num_experts != call.num_experts:
        return False
    steps = call.units // (sizes.groups * GROUP)
    return sizes.shares == 1 and sizes.rows >= call.per_token and steps >= HALVES and chooses(routing, is_biased=False)


def one_token(
    call: ExpertsCall, operands: OneTokenOperands, sizes: FewRowsSizes, logits: Float32[Array, "S R E"]
) -> Float32[Array, "parts 1 D"]:
    """What each chosen expert returns, times its weight, of each half of the depth.

    Args:
        logits: As of the kernel of weights of 16 bits.
    """
    assert call.routing is not None
    assert logits.shape[1] == WARPS
    product = _OneToken(routing=call.routing, sizes=sizes, units=call.units, activation=call.activation)
    if tiles.interpret_params() is None:
        parts, _ = product.run(operands, logits)
    else:  # which has no memory that blocks wait in
        (hidden,) = dataclasses.replace(product, second=False).run(operands, logits)
        (parts,) = dataclasses.replace(product, first=False).run(operands._replace(hidden=hidden), logits)
    return parts.reshape(-1, 1, call.units)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OneToken:
    routing: Routing
    sizes: FewRowsSizes
    units: int  # hidden units of an expert, and columns of the token
    activation: Callable[[Any, Any], Any]
    first: bool = True  # which products it does
    second: bool = True

    @property
    def _depth(self) -> int:
        """Of a stage."""
        return self.sizes.groups * GROUP

    @property
    def _steps(self) -> int:
        return self.units // self._depth

    @property
    def _units(self) -> OneTokenUnits:
        return OneTokenUnits(per_token=self.routing.per_token, hidden=self.units, steps=self._steps)

    def run(self, operands: OneTokenOperands, logits: Any) -> Any:
        leaves, tree = jax.tree.flatten(operands)
        out_types = []
        if self.second:
            out_types.append(jax.ShapeDtypeStruct((HALVES * self.routing.per_token * self.units,), jnp.float32))
        if self.first:
            out_types.append(jax.ShapeDtypeStruct((self.routing.per_token * self.units,), operands.x.dtype))
        run = launch.kernel(
            functools.partial(self.body, tree),
            out_type=out_types,
            grid=(tiles.num_sms(),),
            grid_names=("block",),
            num_threads=self.sizes.consumers + 2,
            kernel_name="one_token_mxfp4",
        )
        given = jax.new_ref(logits) if self.first and self.second else logits
        return run(*leaves, given)

    def body(self, tree: Any, *refs: Any) -> None:
        count, sizes, per_token = tree.num_leaves, self.sizes, self.routing.per_token
        operands, logits, outs = jax.tree.unflatten(tree, refs[:count]), refs[count], list(refs[count + 1 :])
        parts = outs.pop(0) if self.second else None
        hidden = outs.pop(0) if self.first else operands.hidden
        stages: dict[str, Any] = {"num_barriers": sizes.stages}
        two: dict[str, Any] = {"num_barriers": _BUFFERS}
        scratch = _Scratch(
            kernel=plgpu.SMEM((sizes.stages, sizes.shares, HALVES, HALF, self._depth // NUMBERS_OF_BYTE), MXFP4),
            scales=plgpu.SMEM((sizes.stages, sizes.rows_of_scales, HALVES, HALF), MXFP4),
            x=plgpu.SMEM((self.units // GROUP, sizes.rows, GROUP), jnp.float16),
            factors=plgpu.SMEM((_BUFFERS, sizes.rows), jnp.float32),
            sums=plgpu.SMEM((_BUFFERS, sizes.consumers, WGMMA_ROWS, sizes.row_sums), jnp.float32),
            scores=plgpu.SMEM((per_token, WARPS), jnp.float32),
            weights=plgpu.SMEM((per_token, WARPS), jnp.float32),
            experts=plgpu.SMEM((per_token, WARPS), jnp.int32),
            full=plgpu.Barrier(num_arrivals=2, **stages),
            empty=plgpu.Barrier(**stages),
            rows_full=plgpu.Barrier(**two),
            summed=plgpu.Barrier(num_arrivals=sizes.consumers, **two),
            free=plgpu.Barrier(**two),
            chosen=plgpu.Barrier(),
        )

        def warpgroup(scratch: _Scratch) -> None:
            number = lax.axis_index("warpgroup")

            @pl.when(number < sizes.consumers)
            def consume():
                plgpu.set_max_registers(sizes.registers.consumer, action="increase")
                self._consume(scratch, number)

            @pl.when(number == sizes.consumers)
            def around():
                plgpu.set_max_registers(sizes.registers.last, action="decrease")
                self._prepare_and_finish(operands, logits, hidden, parts, scratch)

            @pl.when(number == sizes.consumers + 1)
            def produce():
                plgpu.set_max_registers(sizes.registers.producer, action="decrease")
                tiles.by_warps(1, lambda *_: self._produce(operands, scratch))

        pl.run_scoped(warpgroup, scratch, collective_axes="warpgroup")

    def _expert(self, operands: Any, scratch: _Scratch, choice: Any) -> Any:
        """Its number among those of all layers."""
        return operands.layer[0] * self.routing.num_experts + scratch.experts[choice, 0]

    def _produce(self, operands: Any, scratch: _Scratch) -> None:
        stages, groups, width = self.sizes.stages, self.sizes.groups, self._depth // NUMBERS_OF_BYTE
        plgpu.barrier_wait(scratch.chosen)

        def copies(of_second, weights, scales):
            def copy_unit(_, choice, block, half, done):
                first, steps = self._units.steps_of(of_second, half)
                expert = self._expert(operands, scratch, choice)
                # 32 of the gate's outputs and 32 of the other half's, or 64 that are neighbours.
                columns = (pl.ds(block * HALVES, HALVES),) if of_second else (pl.ds(0, HALVES), block)

                @pl.loop(0, steps)
                def copy_step(k):
                    stage = lax.rem(done + k, stages)
                    pl.when(done + k >= stages)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
                    full, inputs = scratch.full.at[stage], pl.ds((first + k) * width, width)
                    of_weights = weights.at[expert, *columns, pl.ds(0, HALF), inputs]
                    plgpu.copy_gmem_to_smem(of_weights, scratch.kernel.at[stage, 0], full)
                    own, target = pl.ds((first + k) * groups, groups), scratch.scales.at[stage, pl.ds(0, groups)]
                    plgpu.copy_gmem_to_smem(scales.at[expert, own, *columns], target, full)

                return done + steps

            return copy_unit

        done = jnp.int32(0)
        if self.first:
            done = self._units.for_each(False, copies(False, operands.gate_up, operands.gate_up_scales), done)
        if self.second:
            done = self._units.for_each(True, copies(True, operands.down, operands.down_scales), done)
        wait_for_last(scratch.empty, done, stages)

    def _consume(self, scratch: _Scratch, warpgroup: Any) -> None:
        stages, consumers = self.sizes.stages, self.sizes.consumers
        shape, groups = (WGMMA_ROWS, self.sizes.rows), self.sizes.groups

        def products(of_second, before):
            def multiply_unit(number, choice, block, half, done):
                del choice, block
                first, steps = self._units.steps_of(of_second, half)
                own = lax.rem(warpgroup + consumers - lax.rem(done, consumers), consumers)

                def multiply_step(i, total):
                    k = own + i * consumers
                    stage = lax.rem(done + k, stages)
                    plgpu.barrier_wait(scratch.full.at[stage])
                    x = scratch.x.at[pl.ds((first + k) * groups, groups)]
                    weights, scales = scratch.kernel.at[stage], scratch.scales.at[stage]
                    total = stage_added(total, weights, scales, x, shares=1)
                    plgpu.barrier_arrive(scratch.empty.at[stage])
                    return total

                none = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
                total = lax.fori_loop(0, lax.div(steps - own + consumers - 1, consumers), multiply_step, none)
                place = lax.rem(before + number, _BUFFERS)
                pl.when(before + number >= _BUFFERS)(lambda: plgpu.barrier_wait(scratch.free.at[place]))
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

    def _prepare_and_finish(self, operands: Any, logits: Any, hidden: Any, parts: Any, scratch: _Scratch) -> None:
        numbers = functools.partial(of_splits, logits, layout=by_experts(self.routing))
        choose_for_one(self.routing, numbers, None, scratch.scores, scratch.weights, scratch.experts)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.chosen)
        plgpu.barrier_wait(scratch.chosen)
        total = (self._units.count(False) if self.first else 0) + (self._units.count(True) if self.second else 0)
        before = jnp.int32(0)
        if self.first:
            self._prepare(operands.x.at[0], scratch, 0, 0)
            plgpu.barrier_arrive(scratch.rows_full.at[0])

            def finish_first(number, choice, block, half, _):
                del half
                expert = self._expert(operands, scratch, choice)
                store = functools.partial(
                    store_hidden, hidden, operands.gate_up_bias, scratch.factors[0, 0], self.activation, self._units
                )
                self._finish(scratch, number, total, functools.partial(store, expert, choice, block))
                if self.second:
                    all_blocks.tell(logits.at[0, 1])
                return 0

            self._units.for_each(False, finish_first, 0)
            before = self._units.count(False)
        if self.second:
            if self.first:
                all_blocks.wait_for_all(logits.at[0, 1], self._units.total(False))
            first, last = (self._units.unit(True, number)[0] for number in (0, self._units.count(True) - 1))

            @pl.loop(first, last + 1)
            def prepare(number):
                choice = lax.rem(number, self.routing.per_token)
                begin = pl.multiple_of(choice * self.units, MULTIPLE)
                self._prepare(hidden.at[pl.ds(begin, self.units)], scratch, 1, choice)

            plgpu.barrier_arrive(scratch.rows_full.at[1])

            def finish_second(number, choice, block, half, _):
                expert = self._expert(operands, scratch, choice)
                factor, weight = scratch.factors[1, choice], scratch.weights[choice, 0]
                store = functools.partial(store_returned, parts, operands.down_bias, factor, weight, self._units)
                self._finish(scratch, before + number, total, functools.partial(store, expert, choice, block, half))
                return 0

            self._units.for_each(True, finish_second, 0)

    def _finish(self, scratch: _Scratch, number: Any, total: Any, store: Callable[[Any], None]) -> None:
        """Waits for a unit's sums, and stores what they make."""
        place = lax.rem(number, _BUFFERS)
        plgpu.barrier_wait(scratch.summed.at[place])
        store(scratch.sums.at[place])
        pl.when(number + _BUFFERS < total)(lambda: plgpu.barrier_arrive(scratch.free.at[place]))

    def _prepare(self, row: Any, scratch: _Scratch, product: int, number: Any) -> None:
        """A row in float16, and its factor."""
        scratch.factors[product, number] = put_in_float16(row, scratch.x, number)
