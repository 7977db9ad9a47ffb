"""A layer of one token from attention's output on, with weights in int4, in one kernel on Hopper.

grid (blocks)             an SM each; of each product every n-th unit: 32 columns of the weights, a share of the depth
  producer warps          TMA: weights and their scales, 512 inputs a stage, from one product into the next
  consumer warpgroups     make the row of a product together, a share each; then every n-th stage each: weights made
                          wider in registers, a product of 128 inputs, times its scales
  last warpgroup          what the consumers' sums make: biases, activation, the way out

  output                  attention's output to the residual stream's width
  gated                   of the norm of the sum: gate and up, and the activation
  down                    of all hidden units
  next                    of the next layer's norm of the next sum: its queries, keys and values

  full, empty             producer -> a consumer: a stage has arrived; back: it may be overwritten
  row_full                among the consumers: a product's row is there
  summed, free            consumers -> last warpgroup: their sums of a unit are there; back: others may be put there

Between products blocks wait for what others have stored (`arrivals`), while weights of the next one arrive: no choice
hangs on a row, so that memory is busy from the first product's beginning to the last one's end.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.arrivals import Sums
from jattn_kernels.mosaic.sm90.common.one_row import rounded_sum
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.int4.unpacked import packed_tile
from jattn_kernels.mosaic.sm90.mlp.compact_row import CompactRow
from jattn_kernels.mosaic.sm90.mlp.hidden import HiddenRoom
from jattn_kernels.mosaic.sm90.mlp.operands import Made, MlpOperands, Scratch, Weights
from jattn_kernels.mosaic.sm90.mlp.producer import COPIES, copy_all
from jattn_kernels.mosaic.sm90.mlp.result import MlpResult
from jattn_kernels.mosaic.sm90.mlp.rows import PIECE, Piece, given_sum, of_all, pieces
from jattn_kernels.mosaic.sm90.mlp.sizes import BUFFERS, CONSUMERS, STAGES
from jattn_kernels.mosaic.sm90.mlp.stage_products import SUMS, stage_added, store_sums
from jattn_kernels.mosaic.sm90.mlp.units import DEPTH, PARTS, SHARES, SIDE, RowProduct

OUTPUT, GATED, DOWN, NEXT = PHASES = "output", "gated", "down", "next"
_REGISTERS = 96, 56, 40  # of a thread of the consumers, of the last warpgroup, of the producer
_SHARE = DEPTH // SHARES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlp:
    """The kernel, or some of its phases.

    Attributes:
        output, gated, down, next: Its products; there may be no next one.
        dtype: The token's.
        group_size: Inputs that share a scale.
        eps, offset: Of the first norm, and of the next one.
        rows_left: Of each split of the result, all but the first of which are 0.
        phases: Which are this launch's.
    """

    output: RowProduct
    gated: RowProduct
    down: RowProduct
    next: RowProduct | None
    activation: Callable[[Any, Any], Any]
    dtype: Any
    group_size: int
    eps: tuple[float, float]
    offset: tuple[float, float]
    rows_left: int
    phases: tuple[str, ...] = PHASES

    @property
    def columns(self) -> int:
        """Of the token."""
        return self.output.columns

    def products(self) -> list[tuple[str, RowProduct]]:
        """This launch's."""
        found = {OUTPUT: self.output, GATED: self.gated, DOWN: self.down, NEXT: self.next}
        return [(phase, product) for phase, product in found.items() if phase in self.phases and product is not None]

    def run(self, operands: MlpOperands) -> Made:
        """What its phases make."""
        leaves, tree = jax.tree.flatten(operands)
        if len(self.phases) > 1:  # blocks leave each other things in what nobody else reads
            leaves = [jax.new_ref(leaf) if leaf is operands.left else leaf for leaf in leaves]
        types, made_tree = jax.tree.flatten(self._made_types())
        run = launch.kernel(
            functools.partial(self._body, tree, made_tree),
            out_type=types,
            grid=(tiles.num_sms(),),
            grid_names=("block",),
            num_threads=CONSUMERS + 2,
            reduction_bytes=0,
            kernel_name="one_token_mlp",
        )
        return jax.tree.unflatten(made_tree, run(*leaves))

    def _made_types(self) -> Made:
        def array(*shape: int, dtype: Any = jnp.float32) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        made, is_one = Made(), len(self.phases) > 1
        if OUTPUT in self.phases and not is_one:
            made = made._replace(sums=array(self.output.splits, self.columns))
        if GATED in self.phases:
            made = made._replace(total=array(1, self.columns, dtype=self.dtype))
            made = made if is_one else made._replace(hidden=array(self.gated.result_columns, dtype=self.dtype))
        if DOWN in self.phases:
            made = made._replace(parts=array(self.down.splits, self.rows_left, self.columns))
        if self.next is not None and NEXT in self.phases:
            made = made._replace(next=array(self.next.splits, WARPS, self.next.columns))
        return made

    def _body(self, tree: Any, made_tree: Any, *refs: Any) -> None:
        operands = jax.tree.unflatten(tree, refs[: tree.num_leaves])
        made = jax.tree.unflatten(made_tree, refs[tree.num_leaves :])

        def warpgroup(scratch: Scratch) -> None:
            number = lax.axis_index("warpgroup")
            consumer, last, producer = _REGISTERS

            @pl.when(number < CONSUMERS)
            def consume():
                plgpu.set_max_registers(consumer, action="increase")
                self._consume(operands, made, scratch, number)

            @pl.when(number == CONSUMERS)
            def finish():
                plgpu.set_max_registers(last, action="decrease")
                self._result.clear(made.parts)
                for phase, product, weights, before in self._weights(operands):
                    rooms = self._rooms(operands, made)
                    self._result.store(phase, product, weights, before, made, rooms, scratch)

            @pl.when(number == CONSUMERS + 1)
            def produce():
                plgpu.set_max_registers(producer, action="decrease")
                weights = [(product, of_product) for _, product, of_product, _ in self._weights(operands)]
                tiles.by_warps(SHARES, lambda shares, _: copy_all(weights, scratch, shares, self.group_size))

        pl.run_scoped(warpgroup, self._scratch(operands), collective_axes="warpgroup")

    @property
    def _result(self) -> MlpResult:
        total = sum((product.count for _, product in self.products()), jnp.int32(0))
        return MlpResult(columns=self.columns, activation=self.activation, dtype=self.dtype, total=total)

    def _scratch(self, operands: MlpOperands) -> Scratch:
        longest, of_groups = max(self.output.depth, self.down.depth), operands.output.of_groups
        has_zero_points = len(of_groups) > 1
        rows = [CompactRow.scratch(inputs, with_sums=has_zero_points) for inputs in (longest, self.columns)]
        return Scratch(
            kernel=packed_tile((STAGES, WGMMA_ROWS, _SHARE), jnp.int4),
            of_groups=tuple(self._of_stages(each.dtype) for each in of_groups),
            rows=tuple(rows),
            total=plgpu.SMEM((self.columns,), self.dtype),
            sums=plgpu.SMEM((BUFFERS, CONSUMERS, SUMS), jnp.float32),
            full=plgpu.Barrier(num_arrivals=COPIES + SHARES * len(of_groups), num_barriers=STAGES),
            empty=plgpu.Barrier(num_barriers=STAGES),
            row_full=plgpu.Barrier(num_arrivals=CONSUMERS),
            summed=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=BUFFERS),
            free=plgpu.Barrier(num_barriers=BUFFERS),
            met=plgpu.SMEM((2, CONSUMERS * WARPS), jnp.float32),
            there=plgpu.Barrier(num_arrivals=CONSUMERS),
        )

    def _of_stages(self, dtype: Any) -> Any:
        """Shared memory for what groups have."""
        rows = tiles.aligned_rows(DEPTH // self.group_size, SIDE // PARTS * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM((STAGES, PARTS, rows, SIDE // PARTS), dtype)

    def _weights(self, operands: MlpOperands) -> list[tuple[str, RowProduct, Weights, Any]]:
        """The launch's products, their weights, and how many units a block has before."""
        weights = {OUTPUT: operands.output, GATED: operands.gate_up, DOWN: operands.down, NEXT: operands.next}
        found, before = [], jnp.int32(0)
        for phase, product in self.products():
            found.append((phase, product, weights[phase], before))
            before += product.count
        return found

    def _rooms(self, operands: MlpOperands, made: Made) -> dict[str, Any]:
        """Where blocks find each other's results."""
        columns, hidden, output, down = self.columns, self.gated.result_columns, self.output.splits, self.down.splits
        if len(self.phases) > 1:
            rows = [1, 1 + output, 1 + output + pl.cdiv(hidden, 2 * columns)]
            of_output, of_hidden, of_down = (row * columns for row in rows)
            return {
                OUTPUT: Sums(operands.left, of_output, columns, output),
                GATED: HiddenRoom(operands.left, of_hidden, self.dtype),
                DOWN: Sums(operands.left, of_down, columns, down),
            }
        refs = {
            OUTPUT: (operands.sums if made.sums is None else made.sums, columns, output),
            DOWN: (operands.parts, self.rows_left * columns, down),
        }
        found: dict[str, Any] = {phase: Sums(ref, 0, *rest) for phase, (ref, *rest) in refs.items()}
        return found | {GATED: HiddenRoom(operands.hidden if made.hidden is None else made.hidden, 0, self.dtype)}

    def _consume(self, operands: MlpOperands, made: Made, scratch: Scratch, warpgroup: Any) -> None:
        done, rooms, early = jnp.int32(0), self._rooms(operands, made), None
        of_token = pieces(self.columns, CONSUMERS, warpgroup)
        for phase, product, _, before in self._weights(operands):
            row, later = scratch.rows[PHASES.index(phase) % 2], None
            if phase == OUTPUT:
                if len(self.phases) > 1:
                    early = self._early(GATED, operands, of_token)
                for piece in pieces(product.depth, CONSUMERS, warpgroup):
                    row.store(piece, piece.load(operands.attended.at[0]).astype(jnp.float32))
            elif phase == DOWN:
                later = self._bring_hidden(rooms[GATED], scratch, row, warpgroup)
            else:
                early = early or self._early(phase, operands, of_token)
                self._make_normed(phase, operands, made, scratch, rooms, row, of_token, early, warpgroup)
            _meet(scratch.row_full)
            if phase == DOWN and len(self.phases) > 1:
                early = self._early(NEXT, operands, of_token)
            done = self._multiply(product, scratch, row, warpgroup, before, done, later)

    def _bring_hidden(
        self, room: HiddenRoom, scratch: Scratch, row: CompactRow, warpgroup: Any
    ) -> tuple[int, Callable[[], None]] | None:
        """Brings what blocks have made before their last units of the first product.

        Returns:
            The first step that is of others, and what brings these; None if all are there.
        """
        of_row = pieces(self.down.depth, CONSUMERS, warpgroup)
        before = (self.gated.most - 1) * tiles.num_sms() * self.gated.side // (CONSUMERS * PIECE)

        def bring(those: list[Piece]) -> None:
            for piece in those:
                row.store(piece, room.load(piece))

        def bring_others() -> None:
            bring(of_row[before:])
            _meet(scratch.row_full)

        bring(of_row[:before] or of_row)
        return (before * CONSUMERS * PIECE // DEPTH, bring_others) if 0 < before < len(of_row) else None

    def _early(self, phase: str, operands: MlpOperands, of_token: list[Piece]) -> list[tuple[Any, jax.Array]]:
        """Of each piece what a sum and its norm are of that is there before the product that is added.

        It is read while memory has less to do than when that product is there: weights are asked for far ahead.
        """
        if phase == NEXT and operands.next_norm is None:
            return []
        scale: Any = operands.next_norm if phase == NEXT else operands.norm
        of_layer = scale.scale.at[scale.layer[0]]
        sums = [None if phase == NEXT else given_sum(piece, operands.x, operands.left) for piece in of_token]
        return [
            (given if given is None else given.astype(self.dtype), piece.load(of_layer))
            for given, piece in zip(sums, of_token, strict=True)
        ]

    def _make_normed(
        self,
        phase: str,
        operands: MlpOperands,
        made: Made,
        scratch: Scratch,
        rooms: Any,
        row: CompactRow,
        of_token: list[Piece],
        early: list[tuple[Any, jax.Array]],
        warpgroup: Any,
    ) -> None:
        """A warpgroup's pieces of the norm of a sum."""
        is_next, totals, total = phase == NEXT, [], None if GATED in self.phases else operands.total
        for piece, (before, _) in zip(of_token, early, strict=True):
            if is_next:
                before = piece.load(scratch.total if total is None else total.at[0])
            addition = rooms[DOWN if is_next else OUTPUT].added_up(piece.numbers, piece.layout)
            totals.append(rounded_sum(before.astype(jnp.float32), addition, dtype=self.dtype))
        squares = functools.reduce(
            operator.add, [piece.once(total * total) for piece, total in zip(of_token, totals, strict=True)]
        )
        squares = of_all(warpgroup, scratch.met.at[int(is_next)], scratch.there, squares)
        inverse = lax.rsqrt(squares / self.columns + self.eps[is_next])
        for piece, total, (_, factor) in zip(of_token, totals, early, strict=True):
            normed = total * inverse * (factor.astype(jnp.float32) + self.offset[is_next])
            row.store(piece, normed.astype(self.dtype).astype(jnp.float32))
            if not is_next:
                self._keep(made, scratch, piece, total.astype(self.dtype))

    def _keep(self, made: Made, scratch: Scratch, piece: Piece, total: jax.Array) -> None:
        """A piece of the sum, for the next one, and for who asked."""
        piece.put(scratch.total, total)

        @pl.when(lax.axis_index("block") == 0)
        def store():
            piece.put(made.total.at[0], total)

    def _multiply(
        self, product: RowProduct, scratch: Scratch, row: CompactRow, warpgroup: Any, before: Any, done: Any, later: Any
    ) -> Any:
        """Leaves the sums of the warpgroup's steps of all the block's units; the steps so far.

        Args:
            before: Units of products before.
            later: The first step whose inputs are not there, and what brings them; or None.
        """

        def multiply_unit(number, block, split, first, steps, done):
            del block, split
            own = lax.rem(warpgroup + CONSUMERS - lax.rem(done, CONSUMERS), CONSUMERS)

            def multiply_step(i, total):
                k = own + i * CONSUMERS
                stage = lax.rem(done + k, STAGES)
                plgpu.barrier_wait(scratch.full.at[stage])
                begin = (first + k) * DEPTH
                of_groups = [each.at[stage] for each in scratch.of_groups]
                total = stage_added(total, scratch.kernel.at[stage], of_groups, self.group_size, row, begin)
                plgpu.barrier_arrive(scratch.empty.at[stage])
                return total

            def own_steps(steps: Any) -> Any:
                return lax.div(jnp.maximum(steps - own, 0) + CONSUMERS - 1, CONSUMERS)

            total, there = plgpu.layout_cast(jnp.zeros((SUMS, TILED_ROWS), jnp.float32), plgpu.Layout.WGMMA), 0
            if later is not None:
                first_later, bring = later
                there = own_steps(jnp.clip(first_later - first, 0, steps))
                total = lax.fori_loop(0, there, multiply_step, total)
                pl.when(number == 0)(bring)
            total = lax.fori_loop(there, own_steps(steps), multiply_step, total)
            place = lax.rem(before + number, BUFFERS)
            pl.when(before + number >= BUFFERS)(lambda: plgpu.barrier_wait(scratch.free.at[place]))
            store_sums(total, scratch.sums.at[place, warpgroup])
            plgpu.barrier_arrive(scratch.summed.at[place])
            return done + steps

        return product.for_each(multiply_unit, done)


def _meet(barrier: Any) -> None:
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
