"""The mixture of one token on Hopper in one kernel, of weights in mxfp4, alone or with what comes before and after it.

grid (blocks)             an SM each
  rows' warpgroup         what the consumer of `one_token` does, but for the experts' products: of these it has the
                          rows, and what becomes of their sums (`one_token_few_bits`)
  producer warps          one asks for weights of the products before and after, in their ring, as far ahead as it
                          goes; one for experts' weights, in a ring of their own, once these are known
  consumer warpgroups     experts' products
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
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.arrivals import Sums
from jattn_kernels.mosaic.sm90.common.columns import put_columns
from jattn_kernels.mosaic.sm90.common.phases import in_one
from jattn_kernels.mosaic.sm90.common.product_tiles import wait_for_last
from jattn_kernels.mosaic.sm90.common.row_pieces import pieces
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token import (
    FIRST,
    LAST,
    NEXT,
    PRODUCT,
    ROUTER,
    SECOND,
    OneToken,
)
from jattn_kernels.mosaic.sm90.experts.one_token_few_bits import FewBitsHidden, FewBitsPhases, ToldFewBitsHidden
from jattn_kernels.mosaic.sm90.experts.one_token_fits import few_bits_sizes, next_phase, router_phases
from jattn_kernels.mosaic.sm90.experts.one_token_products import ROW_OF_HIDDEN, ROWS_OF_EXPERTS
from jattn_kernels.mosaic.sm90.experts.one_token_stages import (
    DEPTH,
    Count,
    Made,
    OneTokenOperands,
    Ring,
    Scratch,
    left_parts,
)
from jattn_kernels.mosaic.sm90.experts.warp_choice import ranked_width

_PRODUCERS = 2  # warps


def one_token(call: ExpertsCall, operands: OneTokenOperands) -> Made:
    """As `one_token` of weights of 16 bits; a part is what one block adds up, and parts that none has are 0."""
    assert call.routing is not None
    sizes = few_bits_sizes(call)
    assert sizes is not None
    experts = FewBitsPhases(
        routing=call.routing, sizes=sizes, units=call.units, activation=call.activation, rows_left=ROWS_OF_EXPERTS
    )
    kernel = _OneTokenOfFewBits(routing=call.routing, experts=experts, dtype=jnp.dtype(call.dtype))
    if call.router is not None:
        router = router_phases(call.router, call.routing.num_experts)
        kernel = dataclasses.replace(kernel, router=router, phases=(PRODUCT, ROUTER, FIRST, SECOND))
        if call.router.next is not None:
            following = dataclasses.replace(next_phase(call.router.next, has_shared=False), kept=0)
            kernel = dataclasses.replace(kernel, next=following, phases=(*kernel.phases, NEXT))
    return in_one(kernel, operands, Made(), LAST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OneTokenOfFewBits(OneToken):
    experts: Any  # FewBitsPhases

    @property
    def warpgroups(self) -> int:
        return 2 + self.experts.sizes.consumers

    @property
    def _products(self) -> FewBitsPhases:
        """Those of this launch."""
        return dataclasses.replace(self.experts, first=FIRST in self.phases, second=SECOND in self.phases)

    def hidden_type(self) -> Any:
        per_token, units = self.routing.per_token, self.experts.units
        if self.router is None:
            return jax.ShapeDtypeStruct((per_token * units,), self.dtype)
        return jax.ShapeDtypeStruct((per_token, 1, units), jnp.float32)

    def body(self, tree: Any, made_tree: Any, *refs: Any) -> None:
        count, sizes = tree.num_leaves, self.experts.sizes
        operands, made = jax.tree.unflatten(tree, refs[:count]), jax.tree.unflatten(made_tree, refs[count:])

        def warpgroup(scratch: Scratch) -> None:
            number = lax.axis_index("warpgroup")

            @pl.when(number == 0)
            def of_rows():
                plgpu.set_max_registers(sizes.registers.last, action="increase")
                self._consume(operands, made, scratch)

            @pl.when(number == 1)
            def produce():
                plgpu.set_max_registers(sizes.registers.producer, action="decrease")
                tiles.by_warps(_PRODUCERS, functools.partial(self._produce_by_warps, operands, scratch))

            @pl.when(number > 1)
            def multiply():
                plgpu.set_max_registers(sizes.registers.consumer, action="decrease")
                if self._chooses:
                    self._products.multiply(scratch.few_bits, number - 2)

        pl.run_scoped(warpgroup, self._scratch(), collective_axes="warpgroup")

    def _scratch(self) -> Scratch:
        sizes, router = self.experts.sizes, self.router
        choices = (self.routing.per_token, WARPS)
        made = Scratch(
            kernel=None,
            x=None,
            scores=plgpu.SMEM(choices, jnp.float32),
            weights=plgpu.SMEM(choices, jnp.float32),
            experts=plgpu.SMEM(choices, jnp.int32),
            full=None,
            empty=None,
            chosen=plgpu.Barrier(),
            attended_full=None,
            rows_full=None,
            hidden_full=None,
            total=None,
            keys=None,
            few_bits=self.experts.scratch(),
        )
        if router is None:
            return made
        stages: dict[str, Any] = {"num_barriers": sizes.others}
        return made._replace(
            kernel=tiles.tile((sizes.others, DEPTH, WGMMA_ROWS), self.dtype),
            x=tiles.tile((TILED_ROWS, router.row), self.dtype, copied_columns=WGMMA_ROWS),
            full=plgpu.Barrier(**stages),
            empty=plgpu.Barrier(**stages),
            attended_full=plgpu.Barrier(),
            total=plgpu.SMEM((1, self.experts.columns), self.dtype),
            keys=plgpu.SMEM((ranked_width(self.routing),), jnp.int32),
        )

    def _produce_by_warps(self, operands: Any, scratch: Scratch, numbers: list[Any], _: Any) -> None:
        for number in numbers:
            pl.when(number == 0)(functools.partial(self._produce, operands, scratch))
            pl.when(number == 1)(functools.partial(self._produce_experts, operands, scratch))

    def _produce(self, operands: Any, scratch: Scratch) -> None:
        """Asks for weights of the products before and after."""
        if self.router is None:
            return
        ring, done = Ring(scratch.kernel.shape[0]), jnp.int32(0)
        if PRODUCT in self.phases:
            done = self.router.produce_product(operands, scratch, done)
        if ROUTER in self.phases:
            done = self.router.produce_router(operands, scratch, done)
        if self.next is not None and NEXT in self.phases:
            done, _ = self.next.produce(operands, scratch, ring, done)
        wait_for_last(scratch.empty, done, ring.stages)

    def _produce_experts(self, operands: Any, scratch: Scratch) -> None:
        if self._chooses:
            plgpu.barrier_wait(scratch.chosen)
            self._products.produce(operands.few_bits, scratch.few_bits, scratch.experts)

    def _consume(self, operands: Any, made: Made, scratch: Scratch) -> None:
        products, logits, returned, hidden = self._rooms(operands, made)
        experts, router, done, row = self._products, self.router, jnp.int32(0), None
        if SECOND in self.phases:
            experts.clear(made.parts)
        if router is not None and PRODUCT in self.phases:
            done = router.consume_product(operands, None, None, products, scratch, done)
        if router is not None and (ROUTER in self.phases or FIRST in self.phases):
            row = router.sum(operands, products, made.total, scratch)
        if router is not None and ROUTER in self.phases:
            done = router.consume_router(operands, logits, scratch, done)
        if FIRST in self.phases:
            if row is None:
                row = [piece.load(operands.x.at[0]) for piece in pieces(experts.units)]
            experts.put_token(row, scratch.few_bits)
        if self._chooses:
            self._choose(operands, logits, scratch)
        given = operands.few_bits, scratch.few_bits, scratch.experts
        if FIRST in self.phases:
            experts.finish_first(*given, hidden)
        if SECOND in self.phases:
            outs = [functools.partial(_store_part, made.parts, 0, made.parts.shape[1] * experts.units, False)]
            if returned is not None:
                outs.append(functools.partial(_store_part, returned.ref, returned.begin, returned.stride, True))
            experts.finish_second(*given, scratch.weights, hidden, outs)
        if self.next is not None and returned is not None and NEXT in self.phases:
            ring = Ring(scratch.kernel.shape[0])
            self.next.consume(operands, returned, made.next, scratch, ring, done)

    def _rooms(self, operands: Any, made: Made) -> tuple[Any, Any, Any, Any]:
        """Where blocks find each other's product, logits, returned and hidden numbers; or None."""
        router, experts, is_one = self.router, self.experts, len(self.phases) > 1
        hidden = operands.hidden if made.hidden is None else made.hidden
        if router is None:
            count = Count(operands.logits.at[0, 1] if is_one else None)
            return None, None, None, FewBitsHidden(hidden, experts.units, count, experts.num_hidden)
        columns = experts.columns
        if is_one:
            left = left_parts(operands.router)
            stride = left.shape[1] * columns
            products, logits = router.room(left)
            returned = None if self.next is None else Sums(left, 2 * columns, stride, experts.num_parts)
            hidden = Sums(left, ROW_OF_HIDDEN * columns, stride, 1)
        else:
            products, logits = (
                None if ref is None else Sums(ref, 0, ref.shape[-1], ref.shape[0])
                for ref in (
                    operands.products if made.products is None else made.products,
                    operands.logits if made.logits is None else made.logits,
                )
            )
            returned = None
            if operands.parts is not None:
                returned = Sums(operands.parts, 0, experts.rows_left * columns, experts.num_parts)
            hidden = None if hidden is None else Sums(hidden, 0, experts.units, 1)
        return products, logits, returned, None if hidden is None else ToldFewBitsHidden(hidden, self.dtype)


def _store_part(ref: Any, begin: int, stride: int, told: bool, part: Any, column: Any, numbers: Any, side: int) -> None:
    put_columns(ref, begin + part * stride + column, numbers, side, told=told)
