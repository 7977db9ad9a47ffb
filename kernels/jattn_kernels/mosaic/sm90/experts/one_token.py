"""The mixture of one token on Hopper in one kernel: its choice of experts, and both of their products.

grid (blocks)             an SM each; takes every n-th of the units: 64 hidden units of an expert; 64 columns of what an
                          expert returns. Who has fewer of the first has more of the second.
  producer warpgroup      TMA: weights, 128 inputs of 64 columns a stage, stages ahead, from one product into the next
  consumer warpgroup      the choice of experts; acc^T += w^T x^T, columns of the weights on wgmma's 64 rows and the
                          token, with 7 others that nobody needs, on its columns
  chosen                  consumer -> producer, and itself: the experts are known, in shared memory
  full                    producer -> consumer: a stage has arrived; `empty` back: it may be overwritten
  hidden units            in global memory: a block reads those that its second product's units need when they are there
                          (`one_token_hidden`); the weights are in shared memory by then

Each block makes the choice for itself, after its hidden units of experts that all tokens go to, or its share of their
depth (`one_token_shared`). All other sums are over the whole depth in its order, as `grouped_product` has them.

It may begin earlier, with attention (`one_token_attention`; over latent rows `one_token_latents`, with heads' values,
`one_token_values`), the product that is added to the residual stream last, the norm of the sum and the router's product
(`one_token_router`), as `skinny_matmul` has them, to the bit where their depths are split alike; and go on with the
next layer's first product (`one_token_next`), some of whose weights are asked for while the experts are not known.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.call import ExpertsCall
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.arrivals import Sums
from jattn_kernels.mosaic.sm90.common.phases import in_one
from jattn_kernels.mosaic.sm90.common.product_tiles import wait_for_last
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS
from jattn_kernels.mosaic.sm90.experts.one_token_attention import SplitRoom
from jattn_kernels.mosaic.sm90.experts.one_token_fits import next_phase, router_phases, rows_left
from jattn_kernels.mosaic.sm90.experts.one_token_hidden import CountedHidden
from jattn_kernels.mosaic.sm90.experts.one_token_latents import LatentPhase
from jattn_kernels.mosaic.sm90.experts.one_token_next import NextPhase
from jattn_kernels.mosaic.sm90.experts.one_token_products import (
    ROW_OF_HIDDEN,
    ROWS_LEFT,
    ROWS_OF_EXPERTS,
    ExpertPhases,
)
from jattn_kernels.mosaic.sm90.experts.one_token_router import RouterPhases
from jattn_kernels.mosaic.sm90.experts.one_token_stages import (
    STAGES,
    Count,
    Made,
    OneTokenOperands,
    Ring,
    Scratch,
    left_parts,
    scratch,
)
from jattn_kernels.mosaic.sm90.experts.warp_choice import (
    by_experts,
    choose_by_rank,
    choose_for_one,
    of_splits,
    ranks,
)
from jattn_kernels.operands import TokenOperands
from jattn_kernels.routing_spec import Routing

ATTEND, VALUES, PRODUCT, ROUTER = "attend", "values", "product", "router"
FIRST, SECOND, NEXT = "first", "second", "next"
LAST = "next", "k_pages", "v_pages"  # of what is made: that no later phase needs


def one_token(call: ExpertsCall, operands: OneTokenOperands) -> Made:
    """What each chosen expert returns, times its weight, and in the rows after it 0; and what else is asked for.

    The logits are parts of four rows, as a product's splits have them: the router's numbers are the sum of the first
    rows; the others are 0.
    """
    assert call.routing is not None
    phases = ExpertPhases.of(call)
    kernel = OneToken(routing=call.routing, experts=phases, dtype=jnp.dtype(call.dtype))
    if call.router is not None:
        router = router_phases(call.router, call.routing.num_experts)
        before = () if router.attention is None else (ATTEND,) if router.values is None else (ATTEND, VALUES)
        rows = rows_left(call.router.leaves_for, phases.per_token, phases.columns)
        kernel = dataclasses.replace(kernel, experts=dataclasses.replace(phases, rows_left=rows))
        kernel = dataclasses.replace(kernel, router=router, phases=(*before, PRODUCT, ROUTER, FIRST, SECOND))
        if call.router.next is not None:
            following = next_phase(call.router.next, has_shared=bool(phases.shared))
            kernel = dataclasses.replace(kernel, next=following, phases=(*kernel.phases, NEXT))
    return in_one(kernel, operands, Made(), LAST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneToken:
    """The kernel, or some of its phases.

    Attributes:
        dtype: The token's.
        router, next: What comes before the choice, and after the mixture; None if given, and if nothing does.
        phases: Which are this launch's.
    """

    routing: Routing
    experts: ExpertPhases
    dtype: Any
    router: RouterPhases | None = None
    next: NextPhase | None = None
    phases: tuple[str, ...] = (FIRST, SECOND)

    @property
    def warpgroups(self) -> int:
        """Of a block."""
        return 2

    def run(self, operands: OneTokenOperands) -> Made:
        made = self._made_types()
        leaves, tree = jax.tree.flatten(operands)
        in_place, pages = [], ()
        if len(self.phases) > 1:  # blocks leave each other things in what nobody else reads
            in_place.append(operands.logits if operands.router is None else left_parts(operands.router))
        attention = None if operands.router is None else operands.router.attention
        if isinstance(attention, TokenOperands) and ATTEND in self.phases:
            pages = attention.rotary.k_pages, attention.rotary.v_pages
        refs = {id(leaf): jax.new_ref(leaf) for leaf in (*in_place, *pages)}
        leaves = [refs.get(id(leaf), leaf) for leaf in leaves]
        types, made_tree = jax.tree.flatten(made)
        run = launch.kernel(
            functools.partial(self.body, tree, made_tree),
            out_type=types,
            grid=(tiles.num_sms(),),
            grid_names=("block",),
            num_threads=self.warpgroups,
            kernel_name="one_token_experts",
        )
        made = jax.tree.unflatten(made_tree, run(*leaves))
        if pages:
            k_pages, v_pages = launch.frozen(*(refs[id(leaf)] for leaf in pages))
            made = made._replace(k_pages=k_pages, v_pages=v_pages)
        return made

    def _made_types(self) -> Made:
        def array(*shape: int, dtype: Any = jnp.float32) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        experts, router = self.experts, self.router
        columns = experts.columns
        made = Made()
        if router is not None and router.attention is not None and self.phases == (ATTEND,):
            made = made._replace(attended=array(router.attention.splits, router.attention.record))
        if router is not None and router.values is not None and self.phases == (VALUES,):
            made = made._replace(values=array(router.values.chunks, router.values.depth))
        if router is not None and self.phases == (PRODUCT,):
            made = made._replace(products=array(router.product.splits, columns))
        if router is not None and self.phases == (ROUTER,):
            made = made._replace(logits=array(router.router.splits, router.router.columns))
        if router is not None and ROUTER in self.phases:
            made = made._replace(total=array(1, columns, dtype=self.dtype))
        if FIRST in self.phases and (router is None or SECOND not in self.phases):
            made = made._replace(hidden=self.hidden_type())
        if SECOND in self.phases:
            made = made._replace(parts=array(experts.num_parts, experts.rows_left, columns))
        if self.next is not None and NEXT in self.phases:
            product = self.next.product
            made = made._replace(next=array(product.splits, WARPS, product.columns))
        return made

    def hidden_type(self) -> Any:
        """Of what the first product makes where a launch of its own has the second one."""
        units = self.experts.units
        if self.router is None:
            return jax.ShapeDtypeStruct((TILED_ROWS, units), self.dtype)
        return jax.ShapeDtypeStruct((self.experts.per_token, self.experts.shared_units.rows, units), jnp.float32)

    def body(self, tree: Any, made_tree: Any, *refs: Any) -> None:
        count = tree.num_leaves
        operands, made = jax.tree.unflatten(tree, refs[:count]), jax.tree.unflatten(made_tree, refs[count:])
        row = max(self.experts.columns, self.experts.units)
        if self.router is not None:
            row = max(row, self.router.row, self.experts.told_width)

        def warpgroup(scratch: Scratch) -> None:
            number = lax.axis_index("warpgroup")
            pl.when(number == 0)(functools.partial(self._consume, operands, made, scratch))
            pl.when(number == 1)(functools.partial(self._produce, operands, scratch))

        attention = None if self.router is None else self.router.attention
        copies = {} if attention is None else {"key_copies": attention.arrivals}
        if isinstance(attention, LatentPhase):
            copies |= {"query_copies": attention.query_copies, "heads": attention.spec.num_q_heads}
        buffers = scratch(row, self.experts.columns, self.routing, self.dtype, **copies)
        pl.run_scoped(warpgroup, buffers, collective_axes="warpgroup")

    def _produce(self, operands: Any, scratch: Scratch) -> None:
        before = jnp.int32(0)
        if self.router is not None and self.router.attention is not None and ATTEND in self.phases:
            before = self.router.attention.produce(operands.router.attention, scratch, before)
        if self.router is not None and self.router.values is not None and VALUES in self.phases:
            before = self.router.values.produce(operands.router.attention, scratch, before)
        if self.router is not None and PRODUCT in self.phases:
            before = self.router.produce_product(operands, scratch, before)
        if self.router is not None and ROUTER in self.phases:
            before = self.router.produce_router(operands, scratch, before)
        (ring, done), kept = self._ring(before), jnp.int32(0)
        if self.next is not None and NEXT in self.phases:
            self.next.produce_first(operands, scratch, ring)
        if self.experts.shared and FIRST in self.phases:
            done = self.experts.produce_shared(operands, scratch, ring, done)
        if self._chooses:
            plgpu.barrier_wait(scratch.chosen)
        if FIRST in self.phases:
            done = self.experts.produce_first(operands, scratch, ring, done)
        if SECOND in self.phases:
            done = self.experts.produce_second(operands, scratch, ring, done)
        if self.next is not None and NEXT in self.phases:
            done, kept = self.next.produce(operands, scratch, ring, done)
        if not self._chooses and NEXT not in self.phases:
            wait_for_last(scratch.empty, before, STAGES)
            return
        wait_for_last(scratch.empty, done, ring.stages)

        @pl.loop(0, kept)
        def wait(number):
            plgpu.barrier_wait(scratch.empty.at[ring.stages + number])

    def _ring(self, before: Any) -> tuple[Ring, Any]:
        """The stages of the phases from the choice on, after so many, and how many of them have been used."""
        kept = 0 if self.next is None or NEXT not in self.phases else self.next.kept
        return (Ring(STAGES - kept, before), jnp.int32(0)) if kept else (Ring(), before)

    @property
    def _chooses(self) -> bool:
        """Whether experts must be known."""
        return FIRST in self.phases or SECOND in self.phases

    def _consume(self, operands: Any, made: Made, scratch: Scratch) -> None:
        attended, values, products, logits, returned, hidden = self._exchanged(operands, made)
        done = jnp.int32(0)
        if SECOND in self.phases:
            self.experts.clear(made.parts)
        if self.router is None and FIRST in self.phases:
            rows = scratch.x.at[:, pl.ds(0, self.experts.columns)]
            plgpu.copy_gmem_to_smem(operands.x.at[pl.ds(0, TILED_ROWS)], rows, scratch.rows_full)
        if self.router is not None and self.router.attention is not None and ATTEND in self.phases:
            done = self.router.attention.consume(operands.router.attention, attended, scratch, done)
        if self.router is not None and self.router.values is not None and VALUES in self.phases:
            done = self.router.values.consume(operands.router.attention, attended, values, scratch, done)
        if self.router is not None and PRODUCT in self.phases:
            done = self.router.consume_product(operands, attended, values, products, scratch, done)
        if self.router is not None and (ROUTER in self.phases or FIRST in self.phases):
            self.router.sum(operands, products, made.total, scratch)
        if self.router is not None and ROUTER in self.phases:
            done = self.router.consume_router(operands, logits, scratch, done)
        ring, done = self._ring(done)
        waits = self.router is None and FIRST in self.phases
        if self.experts.shared and FIRST in self.phases:
            if waits:
                plgpu.barrier_wait(scratch.rows_full)
            done, waits = self.experts.consume_shared(hidden, scratch, ring, done), False
        if self._chooses:
            self._choose(operands, logits, scratch)
        if FIRST in self.phases:
            if waits:
                plgpu.barrier_wait(scratch.rows_full)
            done = self.experts.consume_first(hidden, scratch, ring, done)
        if SECOND in self.phases:
            done = self.experts.consume_second(hidden, made.parts, returned, scratch, ring, done, dtype=self.dtype)
        if self.next is not None and NEXT in self.phases:
            self.next.consume(operands, returned, made.next, scratch, ring, done)

    def _exchanged(self, operands: Any, made: Made) -> tuple[Any, Any, Any, Any, Any, Any]:
        """Where blocks find each other's attention, values, product, logits, returned and hidden numbers; or None."""
        router, is_one = self.router, len(self.phases) > 1
        hidden, experts = operands.hidden if made.hidden is None else made.hidden, self.experts
        if router is None:
            count = Count(operands.logits.at[0, 1] if is_one else None)
            return None, None, None, None, None, CountedHidden(hidden, count, experts.hidden_blocks)
        columns = experts.columns
        if is_one:
            left = left_parts(operands.router)
            products, logits = router.room(left)
            returned = None if self.next is None else Sums(left, 2 * columns, left.shape[1] * columns, experts.num_sums)
            hidden = experts.told_hidden(left, ROW_OF_HIDDEN * columns, left.shape[1] * columns, columns, self.dtype)
            attended = values = None
            if router.attention is not None:
                attended = SplitRoom.within(left, ROWS_OF_EXPERTS if router.values is None else ROWS_LEFT + 1)
            if router.values is not None:
                values = Sums(left, ROWS_LEFT * columns, left.shape[1] * columns, router.values.chunks)
            return attended, values, products, logits, returned, hidden
        products, logits = (
            None if ref is None else Sums(ref, 0, ref.shape[-1], ref.shape[0])
            for ref in (
                operands.products if made.products is None else made.products,
                operands.logits if made.logits is None else made.logits,
            )
        )
        returned = (
            None if operands.parts is None else Sums(operands.parts, 0, experts.rows_left * columns, experts.num_sums)
        )
        attended = operands.attended if made.attended is None else made.attended
        if attended is not None:
            attended = SplitRoom(attended, 0, attended.shape[1], attended.shape[0])
        values = operands.values if made.values is None else made.values
        values = None if values is None else Sums(values, 0, values.shape[1], values.shape[0])
        units, rows = experts.units, experts.shared_units.rows
        hidden = experts.told_hidden(hidden, 0, rows * units, units, self.dtype)
        return attended, values, products, logits, returned, hidden

    def _choose(self, operands: Any, logits: Sums | None, scratch: Scratch) -> None:
        """The token's experts and their weights."""
        if logits is not None and ranks(self.routing, is_biased=operands.bias is not None):

            def known() -> None:
                plgpu.barrier_arrive(scratch.chosen)
                plgpu.barrier_wait(scratch.chosen)

            choice = scratch.scores, scratch.weights, scratch.experts
            choose_by_rank(self.routing, logits.added_up, scratch.keys, *choice, known)
            plgpu.commit_smem()
            return
        layout = by_experts(self.routing)

        def numbers(number: jax.Array) -> jax.Array:
            return of_splits(operands.logits, number, layout) if logits is None else logits.added_up(number, layout)

        choose_for_one(self.routing, numbers, operands.bias, scratch.scores, scratch.weights, scratch.experts)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.chosen)
        plgpu.barrier_wait(scratch.chosen)
