"""The mixture of one token on Hopper in one kernel: its choice of experts, and both of their products.

grid (blocks)             an SM each; takes every n-th of the units: 64 hidden units of an expert; 64 columns of what an
                          expert returns. Who has fewer of the first has more of the second.
  producer warpgroup      TMA: weights, 128 inputs of 64 columns a stage, stages ahead, from one product into the next
  consumer warpgroup      the choice of experts; acc^T += w^T x^T, columns of the weights on wgmma's 64 rows and the
                          token, with 7 others that nobody needs, on its columns
  chosen                  consumer -> producer, and itself: the experts are known, in shared memory
  full                    producer -> consumer: a stage has arrived; `empty` back: it may be overwritten
  count                   in global memory: of all hidden units' blocks that have been stored. The second product's rows
                          are read when they are all there; its weights are in shared memory by then.

Each block makes the choice for itself. Sums are over the whole depth in its order, as `grouped_product` has them.
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
from jaxtyping import Array, Float, Float32, Int

from jattn_kernels.call import ExpertsCall
from jattn_kernels.mosaic.sm90.common import all_blocks, launch, tiles
from jattn_kernels.mosaic.sm90.common.indexed import scatter
from jattn_kernels.mosaic.sm90.common.product_tiles import summed_over_stages, wait_for_last
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.choice import chooses
from jattn_kernels.mosaic.sm90.experts.warp_choice import LANES, by_experts, choose_by_warps
from jattn_kernels.routing_spec import Routing

_DEPTH = 128  # of a stage: a copy of 16 KB
_STAGES = 11
_MOST_DEPTH = 2560  # of both products: rows of so many numbers fit beside the stages
_MOST_EXPERTS = 512
_PAIR = 2  # the gate's columns and the other half's


class OneTokenOperands(NamedTuple):
    """What the kernel reads.

    Attributes:
        x: The token.
        bias: On the choice of experts, or None.
        gate_up, down: Weights of all layers.
        layer: Which of them.
        hidden: Hidden units of the chosen experts, if another kernel has made them.
    """

    x: Float[Array, "1 D"]
    bias: Float32[Array, " E"] | None
    gate_up: Float[Array, "L E D F2"]
    down: Float[Array, "L E F D"]
    layer: Int[Array, "1"]
    hidden: Float[Array, "8 F"] | None = None


class _Scratch(NamedTuple):
    kernel: Any  # (stages, 128, 64)
    x: Any  # (8, depth): the token; then the hidden units of its experts
    scores: Any  # (k, 4)
    weights: Any  # (k, 4)
    experts: Any  # (k, 4)
    full: Any
    empty: Any
    chosen: Any
    rows_full: Any
    hidden_full: Any


def fits(call: ExpertsCall, *, is_biased: bool) -> bool:
    """Whether the kernel serves a call.

    Args:
        is_biased: Whether there is a bias on the choice.
    """
    routing = call.routing
    if call.num_tokens != 1 or call.scales is not None or call.weighs_inputs or call.features or routing is None:
        return False
    if routing.num_experts % LANES or routing.num_experts > _MOST_EXPERTS or routing.num_experts != call.num_experts:
        return False
    if call.per_token > TILED_ROWS or call.device.num_sms is None:  # blocks wait for each other: all must run
        return False
    depths = call.hidden_size, call.units
    return chooses(routing, is_biased=is_biased) and max(depths) <= _MOST_DEPTH and not any(d % _DEPTH for d in depths)


def one_token(
    call: ExpertsCall, operands: OneTokenOperands, logits: Float32[Array, "S R E"]
) -> Float32[Array, "k 1 D"]:
    """What each chosen expert returns, times its weight.

    Args:
        logits: Parts of four rows, as a product's splits have them: the router's numbers are the sum of the first rows;
            the others are 0.
    """
    assert call.routing is not None
    assert logits.shape[1] == WARPS
    product = _OneToken(routing=call.routing, units=call.units, columns=call.hidden_size, activation=call.activation)
    if tiles.interpret_params() is None:
        parts, _ = product.run(operands, logits)
    else:  # which has no memory that blocks wait in
        (hidden,) = dataclasses.replace(product, second=False).run(operands, logits)
        (parts,) = dataclasses.replace(product, first=False).run(operands._replace(hidden=hidden), logits)
    return parts.reshape(-1, 1, call.hidden_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OneToken:
    routing: Routing
    units: int  # hidden units of an expert
    columns: int  # of the token
    activation: Callable[[Any, Any], Any]
    first: bool = True  # which products it does
    second: bool = True

    @property
    def hidden_blocks(self) -> int:
        """Blocks of hidden units of all experts."""
        return self.routing.per_token * (self.units // WGMMA_ROWS)

    @property
    def column_blocks(self) -> int:
        """Blocks of columns of what all experts return."""
        return self.routing.per_token * (self.columns // WGMMA_ROWS)

    def run(self, operands: OneTokenOperands, logits: Any) -> Any:
        leaves, tree = jax.tree.flatten(operands)
        per_token, dtype = self.routing.per_token, operands.x.dtype
        out_types = []
        if self.second:
            out_types.append(jax.ShapeDtypeStruct((per_token * self.columns,), jnp.float32))
        if self.first:
            out_types.append(jax.ShapeDtypeStruct((TILED_ROWS, self.units), dtype))
        run = launch.kernel(
            functools.partial(self.body, tree),
            out_type=out_types,
            grid=(tiles.num_sms(),),
            grid_names=("block",),
            num_threads=2,
            kernel_name="one_token_experts",
        )
        given = jax.new_ref(logits) if self.first and self.second else logits
        return run(*leaves, given)

    def body(self, tree: Any, *refs: Any) -> None:
        count = tree.num_leaves
        operands, logits, outs = jax.tree.unflatten(tree, refs[:count]), refs[count], list(refs[count + 1 :])
        dtype, per_token = operands.x.dtype, self.routing.per_token
        parts = outs.pop(0) if self.second else None
        hidden = outs.pop(0) if self.first else operands.hidden
        row = max(self.columns, self.units)
        scratch = _Scratch(
            kernel=tiles.tile((_STAGES, _DEPTH, WGMMA_ROWS), dtype),
            x=tiles.tile((TILED_ROWS, row), dtype, copied_columns=WGMMA_ROWS),
            scores=plgpu.SMEM((per_token, WARPS), jnp.float32),
            weights=plgpu.SMEM((per_token, WARPS), jnp.float32),
            experts=plgpu.SMEM((per_token, WARPS), jnp.int32),
            full=plgpu.Barrier(num_barriers=_STAGES),
            empty=plgpu.Barrier(num_barriers=_STAGES),
            chosen=plgpu.Barrier(),
            rows_full=plgpu.Barrier(),
            hidden_full=plgpu.Barrier(),
        )

        def warpgroup(scratch: _Scratch) -> None:
            number = lax.axis_index("warpgroup")
            pl.when(number == 0)(functools.partial(self._consume, operands, logits, hidden, parts, scratch))
            pl.when(number == 1)(functools.partial(self._produce, operands, scratch))

        pl.run_scoped(warpgroup, scratch, collective_axes="warpgroup")

    def _count(self, of_second: bool) -> Any:
        """The block's units of a product."""
        units = self.column_blocks if of_second else self.hidden_blocks
        return lax.div(units - self._begin(of_second) + tiles.num_sms() - 1, tiles.num_sms())

    def _begin(self, of_second: bool) -> Any:
        """The block's first unit: of the second product those have the first that have fewer of the first."""
        own, sms = lax.axis_index("block"), tiles.num_sms()
        return lax.rem(own + (sms - self.hidden_blocks % sms), sms) if of_second else own

    def _unit(self, of_second: bool, number: Any) -> tuple[Any, Any]:
        """The choice and the block of columns of the block's n-th unit."""
        blocks = (self.columns if of_second else self.units) // WGMMA_ROWS
        unit = self._begin(of_second) + number * tiles.num_sms()
        return lax.div(unit, blocks), lax.rem(unit, blocks)

    def _for_each(self, of_second: bool, visit: Callable[[Any, Any, Any, Any], Any], start: Any) -> Any:
        """Calls `visit(number, choice, block of columns, carry)` for each unit of the block's; the last carry."""

        def step(number, carry):
            return visit(number, *self._unit(of_second, number), carry)

        return lax.fori_loop(0, self._count(of_second), step, start)

    def _produce(self, operands: Any, scratch: _Scratch) -> None:
        layer = operands.layer[0]
        plgpu.barrier_wait(scratch.chosen)

        def copy(weights: Any, done: Any) -> Any:
            stage = lax.rem(done, _STAGES)
            pl.when(done >= _STAGES)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
            plgpu.copy_gmem_to_smem(weights, scratch.kernel.at[stage], scratch.full.at[stage])
            return done + 1

        def copy_first(_, choice, block, done):
            expert = scratch.experts[choice, 0]

            def copy_step(k, done):
                for part in range(_PAIR):
                    columns = pl.ds(part * self.units + block * WGMMA_ROWS, WGMMA_ROWS)
                    done = copy(operands.gate_up.at[layer, expert, pl.ds(k * _DEPTH, _DEPTH), columns], done)
                return done

            return lax.fori_loop(0, self.columns // _DEPTH, copy_step, done)

        def copy_second(_, choice, block, done):
            expert, columns = scratch.experts[choice, 0], pl.ds(block * WGMMA_ROWS, WGMMA_ROWS)

            def copy_step(k, done):
                return copy(operands.down.at[layer, expert, pl.ds(k * _DEPTH, _DEPTH), columns], done)

            return lax.fori_loop(0, self.units // _DEPTH, copy_step, done)

        done = jnp.int32(0)
        if self.first:
            done = self._for_each(False, copy_first, done)
        if self.second:
            done = self._for_each(True, copy_second, done)
        wait_for_last(scratch.empty, done, _STAGES)

    def _consume(self, operands: Any, logits: Any, hidden: Any, parts: Any, scratch: _Scratch) -> None:
        if self.first:
            plgpu.copy_gmem_to_smem(
                operands.x.at[pl.ds(0, TILED_ROWS)], scratch.x.at[:, pl.ds(0, self.columns)], scratch.rows_full
            )
        self._choose(operands, logits, scratch)
        done = jnp.int32(0)
        if self.first:
            plgpu.barrier_wait(scratch.rows_full)
            done = self._multiply_first(hidden, logits, scratch, done)
        if self.second:
            if self.first:
                all_blocks.wait_for_all(logits.at[0, 1], self.hidden_blocks)
            self._multiply_second(hidden, parts, scratch, done)

    def _choose(self, operands: Any, logits: Any, scratch: _Scratch) -> None:
        """The token's experts and their weights; the rows of the other warps are those of no token."""
        layout, shape = by_experts(self.routing), (WARPS, self.routing.num_experts)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        of_parts = [plgpu.load(logits.at[i], layout=layout, optimized=False) for i in range(logits.shape[0])]
        numbers = jnp.where(row == 0, sum(of_parts[1:], of_parts[0]), 0.0)
        number = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

        def keep(i, expert):
            scratch.experts[i] = expert

        choose_by_warps(self.routing, numbers, number, operands.bias, scratch.scores, scratch.weights, keep)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.chosen)
        plgpu.barrier_wait(scratch.chosen)

    def _multiply_first(self, hidden: Any, count: Any, scratch: _Scratch, done: Any) -> Any:
        steps = self.columns // _DEPTH * _PAIR

        def multiply_unit(_, choice, block, done):
            def product(*sums):
                @pl.loop(0, self.columns // _DEPTH)
                def multiply_step(k):
                    x = scratch.x.at[:, pl.ds(k * _DEPTH, _DEPTH)].transpose((1, 0))
                    for part, acc in enumerate(sums):
                        stage = lax.rem(done + k * _PAIR + part, _STAGES)
                        plgpu.barrier_wait(scratch.full.at[stage])
                        plgpu.wgmma(acc, scratch.kernel.at[stage].transpose((1, 0)), x)
                    plgpu.wgmma_wait(_PAIR)  # those of the last step are done

                    @pl.when(k > 0)
                    def free():
                        for part in range(_PAIR):
                            plgpu.barrier_arrive(scratch.empty.at[lax.rem(done + (k - 1) * _PAIR + part, _STAGES)])

                return [acc[...] for acc in sums]

            results = pl.run_scoped(product, *(tiles.accumulator(WGMMA_ROWS, TILED_ROWS) for _ in range(_PAIR)))
            for part in range(_PAIR):
                plgpu.barrier_arrive(scratch.empty.at[lax.rem(done + steps - _PAIR + part, _STAGES)])
            result = self.activation(*results).astype(hidden.dtype)
            self._store_row(hidden, choice * self.units + block * WGMMA_ROWS, result, 0)
            if self.second:
                all_blocks.tell(count.at[0, 1])
            return done + steps

        return self._for_each(False, multiply_unit, done)

    def _multiply_second(self, hidden: Any, parts: Any, scratch: _Scratch, done: Any) -> None:
        steps = self.units // _DEPTH

        rows = scratch.x.at[:, pl.ds(0, self.units)]
        plgpu.copy_gmem_to_smem(hidden, rows, scratch.hidden_full)
        plgpu.barrier_wait(scratch.hidden_full)

        def multiply_unit(_, choice, block, done):
            def multiply(acc, stage, k):
                x = rows.at[:, pl.ds(k * _DEPTH, _DEPTH)]
                plgpu.wgmma(acc, scratch.kernel.at[stage].transpose((1, 0)), x.transpose((1, 0)))

            shape = WGMMA_ROWS, TILED_ROWS
            result = summed_over_stages(multiply, scratch, done, steps, stages=_STAGES, shape=shape)
            result = result.astype(hidden.dtype).astype(jnp.float32) * scratch.weights[choice, 0]
            self._store_row(parts, choice * self.columns + block * WGMMA_ROWS, result, choice)
            return done + steps

        self._for_each(True, multiply_unit, done)

    def _store_row(self, out: Any, begin: Any, result: jax.Array, number: Any) -> None:
        """One of the rows of a block, from a flat place on."""
        if tiles.interpret_params() is not None:
            own = lax.dynamic_index_in_dim(result, number, axis=1, keepdims=False)
            width = out.shape[-1]
            place = (lax.div(begin, width), pl.ds(lax.rem(begin, width), WGMMA_ROWS))
            out[place[-len(out.shape) :]] = own
            return
        layout = plgpu.Layout.WGMMA
        column, row = (plgpu.broadcasted_iota(jnp.int32, result.shape, axis, layout=layout) for axis in range(2))
        scatter(out, jnp.where(row == number, begin + column, -1), result, layout)
