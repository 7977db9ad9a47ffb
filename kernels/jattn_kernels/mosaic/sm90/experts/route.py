"""Routing on Hopper: each token's best experts, and the order of the rows that go to them, in one block.

one block: warpgroups of 64 tokens each, a token's scores in the registers of four neighbouring threads
  choice        `per_token` times the best expert that is left: two reductions over the experts
  counts        a thread an expert walks down the table of who goes where, and leaves in it how many came before
  slots         where each expert's rows begin, the others' rows before; a token's own from its row of the table

Of two equal scores the one of the lower number is the better. All of it is integer arithmetic but for the weights, so
that the order is always the same.
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
from jaxtyping import Array, Float32, Int32

from jattn_kernels.lowering.expert_groups import GROUP, ExpertGroups, most_slots, most_tiles
from jattn_kernels.lowering.routing import LEAST_SUM
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.experts.scatter import scatter
from jattn_kernels.routing_spec import Routing

_TOKENS = 64  # of a warpgroup
_THREADS = 128
_MOST_SCORES = 512  # experts times warpgroups: what one block has registers and shared memory for
_WGMMA = plgpu.Layout.WGMMA
_OF_TOKENS, _OF_EXPERTS = _WGMMA.reduce(1), _WGMMA.reduce(0)


def fits(num_tokens: int, num_experts: int) -> bool:
    """Whether one block can order so many tokens."""
    return num_experts % GROUP == 0 and _padded(num_experts) * pl.cdiv(num_tokens, _TOKENS) <= _MOST_SCORES


def chooses(routing: Routing, *, is_biased: bool) -> bool:
    """Whether the kernel makes the choice itself; that of groups comes from XLA."""
    by_logits = routing.scoring == "softmax_of_chosen"
    return routing.groups_per_token == routing.num_groups and not (by_logits and is_biased)


def _padded(num_experts: int) -> int:
    return pl.cdiv(num_experts, _THREADS) * _THREADS


class RouteOperands(NamedTuple):
    """Logits and the bias of the choice, or the choice itself.

    Attributes:
        chosen: A row a choice, padded to whole warpgroups.
    """

    logits: Any = None  # Float32[Array, "T E"]
    bias: Any = None  # Float32[Array, " E"]
    chosen: Any = None  # Int32[Array, "k P"]


class _Scratch(NamedTuple):
    logits_and_table: Any  # (warpgroups, 64, E) float32, then (warpgroups, 64, E_padded) int32
    scores: Any  # (warpgroups, k, 64): of the chosen experts
    chosen: Any  # (warpgroups, k, 64)
    counts: Any  # (warpgroups, E_padded): of a warpgroup's tokens
    begins: Any  # (warpgroups, E_padded): where a warpgroup's rows of an expert begin
    room: Any  # (2, E_padded): slots and tiles of an expert
    arrived: Any
    counted: Any
    summed: Any
    begun: Any


def route_and_group(
    routing: Routing, operands: RouteOperands, *, num_tokens: int, block_rows: int, rows_of_choices: bool = False
) -> tuple[Float32[Array, "T k"], ExpertGroups]:
    """The weights of the experts that are chosen here, and the groups, as `group_by_expert` has them."""
    if num_tokens > GROUP:  # fewer, or whole groups: what Mosaic takes
        operands = operands._replace(logits=jnp.pad(operands.logits, ((0, -num_tokens % GROUP), (0, 0))))
    return _run(routing, operands, num_tokens, block_rows, rows_of_choices)


def group_chosen(
    routing: Routing, chosen: Int32[Array, "T k"], *, block_rows: int, rows_of_choices: bool = False
) -> ExpertGroups:
    """The groups of a choice that is made."""
    num_tokens = chosen.shape[0]
    by_choice = jnp.pad(chosen.T, ((0, 0), (0, -num_tokens % _TOKENS)))
    return _run(routing, RouteOperands(chosen=by_choice), num_tokens, block_rows, rows_of_choices)[1]


def _run(
    routing: Routing, operands: RouteOperands, num_tokens: int, block_rows: int, rows_of_choices: bool
) -> tuple[Float32[Array, "T k"], ExpertGroups]:
    per_token, num_experts = routing.per_token, routing.num_experts
    warpgroups = pl.cdiv(num_tokens, _TOKENS)
    by_choice = (per_token, warpgroups * _TOKENS)
    most = most_tiles(num_tokens, per_token, num_experts, block_rows)
    leaves, tree = jax.tree.flatten(operands)
    body = _Body(routing, num_tokens, warpgroups, block_rows, rows_of_choices)
    run = launch.kernel(
        functools.partial(body.block, tree),
        out_type=[
            jax.ShapeDtypeStruct(by_choice, jnp.float32),
            jax.ShapeDtypeStruct(by_choice, jnp.int32),
            jax.ShapeDtypeStruct((most_slots(num_tokens, per_token, num_experts),), jnp.int32),
            jax.ShapeDtypeStruct((most * 3,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ],
        grid=(1,),
        grid_names=("block",),
        num_threads=warpgroups,
        kernel_name="route",
    )
    weights, slots, sources, work, num_tiles = run(*leaves)
    groups = ExpertGroups(slots[:, :num_tokens].T, sources, work.reshape(most, 3), num_tiles)
    return weights[:, :num_tokens].T, groups


class _Outs(NamedTuple):
    weights: Any
    slots: Any
    sources: Any
    work: Any
    num_tiles: Any


@dataclasses.dataclass(frozen=True)
class _Body:
    routing: Routing
    num_tokens: int
    warpgroups: int
    block_rows: int
    rows_of_choices: bool

    def block(self, tree: Any, *refs: Any) -> None:
        operands, outs = jax.tree.unflatten(tree, refs[: tree.num_leaves]), _Outs(*refs[tree.num_leaves :])
        padded, all_of = _padded(self.routing.num_experts), self.warpgroups
        scratch = _Scratch(
            logits_and_table=tiles.overlaid(
                plgpu.SMEM((all_of, _TOKENS, self.routing.num_experts), jnp.float32),
                plgpu.SMEM((all_of, _TOKENS, padded), jnp.int32),
            ),
            scores=plgpu.SMEM((all_of, self.routing.per_token, _TOKENS), jnp.float32),
            chosen=plgpu.SMEM((all_of, self.routing.per_token, _TOKENS), jnp.int32),
            counts=plgpu.SMEM((all_of, padded), jnp.int32),
            begins=plgpu.SMEM((all_of, padded), jnp.int32),
            room=plgpu.SMEM((all_of, 2, padded), jnp.int32),
            arrived=plgpu.Barrier(num_barriers=all_of),
            counted=plgpu.Barrier(num_arrivals=all_of),
            summed=plgpu.Barrier(num_barriers=all_of),
            begun=plgpu.Barrier(num_barriers=all_of),
        )
        pl.run_scoped(functools.partial(self._warpgroup, operands, outs), scratch, collective_axes="warpgroup")

    def _warpgroup(self, operands: RouteOperands, outs: _Outs, scratch: _Scratch) -> None:
        own = lax.axis_index("warpgroup")
        if operands.logits is None:
            self._read_choice(operands, scratch, own)
        else:
            self._choose(operands, outs, scratch, own)
        self._count(scratch, own)
        self._begin(outs, scratch, own)
        self._place(outs, scratch, own)

    def _for_each_choice(self, visit: Callable[[Any], None]) -> None:
        pl.loop(0, self.routing.per_token)(visit)

    def _keep_choice(self, i: Any, chosen: jax.Array, scratch: _Scratch, own: Any) -> None:
        """A choice of each token; of no token and of no expert it is -1."""
        token = plgpu.broadcasted_iota(jnp.int32, (_TOKENS,), 0, layout=_OF_TOKENS) + own * _TOKENS
        real = (token < self.num_tokens) & (chosen >= 0) & (chosen < self.routing.num_experts)
        scratch.chosen[own, i] = jnp.where(real, chosen, -1)

    def _read_choice(self, operands: RouteOperands, scratch: _Scratch, own: Any) -> None:
        tokens = pl.ds(own * _TOKENS, _TOKENS)

        @self._for_each_choice
        def read(i):
            chosen = plgpu.load(operands.chosen.at[i, tokens], layout=_OF_TOKENS, optimized=False)
            self._keep_choice(i, chosen, scratch, own)

    def _choose(self, operands: RouteOperands, outs: _Outs, scratch: _Scratch, own: Any) -> None:
        routing, shape = self.routing, (_TOKENS, self.routing.num_experts)
        arrived = scratch.arrived.at[own]
        rows = operands.logits.at[pl.ds(own * _TOKENS, _TOKENS)]
        as_copied = scratch.logits_and_table[0].at[own]
        plgpu.copy_gmem_to_smem(rows, as_copied, arrived)
        plgpu.barrier_wait(arrived)
        logits = plgpu.load(as_copied, layout=_WGMMA, optimized=False)
        plgpu.commit_smem()  # the table takes its place
        number = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_WGMMA)
        # float32 holds an expert's number; a minimum is a maximum of what is negative.
        negative_number = -number.astype(jnp.float32)

        def spread(of_tokens):
            return lax.broadcast_in_dim(of_tokens, shape, [0])

        if routing.scoring == "sigmoid":
            scores = jax.nn.sigmoid(logits)
        else:
            scores = jnp.exp(logits - spread(logits.max(axis=1)))
        all_scores = scores.sum(axis=1)
        merit = logits
        if operands.bias is not None:
            bias = plgpu.load(operands.bias, layout=_OF_EXPERTS, optimized=False)
            if routing.scoring == "softmax":
                scores = scores / spread(all_scores)
                all_scores = jnp.ones_like(all_scores)
            merit = scores + lax.broadcast_in_dim(bias, shape, [1])

        def choose_next(i, carry):
            merit, total = carry
            best = spread(merit.max(axis=1))
            first = -jnp.where(merit == best, negative_number, -jnp.inf).max(axis=1)
            first = jnp.minimum(first, float(routing.num_experts - 1)).astype(jnp.int32)
            is_first = number == spread(first)
            score = jnp.where(is_first, scores, 0.0).sum(axis=1)
            scratch.scores[own, i] = score
            self._keep_choice(i, first, scratch, own)
            return jnp.where(is_first, -jnp.inf, merit), total + score

        none = plgpu.layout_cast(jnp.zeros((_TOKENS,), jnp.float32), _OF_TOKENS)
        _, of_chosen = lax.fori_loop(0, routing.per_token, choose_next, (merit, none))
        if routing.normalised or routing.scoring == "softmax_of_chosen":
            factor = routing.scaling_factor / (of_chosen + LEAST_SUM)
        elif routing.scoring == "softmax":
            factor = routing.scaling_factor / all_scores
        else:
            factor = jnp.full_like(of_chosen, routing.scaling_factor)

        plgpu.commit_smem()

        @self._for_each_choice
        def weigh(i):
            score = plgpu.load(scratch.scores.at[own, i], layout=_OF_TOKENS, optimized=False)
            outs.weights[i, pl.ds(own * _TOKENS, _TOKENS)] = score * factor

    def _count(self, scratch: _Scratch, own: Any) -> None:
        """The table: how many tokens before a token go to an expert; and how many in all."""
        plgpu.commit_smem()  # the choice
        table, padded = scratch.logits_and_table[1].at[own], _padded(self.routing.num_experts)
        number = plgpu.broadcasted_iota(jnp.int32, (_TOKENS, padded), 1, layout=_WGMMA)

        def add(i, goes):
            return goes + jnp.where(number == self._chosen(i, scratch, own, number.shape), 1, 0)

        goes = lax.fori_loop(0, self.routing.per_token, add, jnp.zeros_like(number))
        table[...] = goes
        self._sync(scratch.summed.at[own])
        layout = plgpu.Layout.WG_STRIDED((padded,), vec_size=1)

        def pass_token(token, before):
            goes = plgpu.load(table.at[token], layout=layout, optimized=False)
            table[token] = before
            return before + goes

        tokens = jnp.minimum(self.num_tokens - own * _TOKENS, _TOKENS)
        none = plgpu.layout_cast(jnp.zeros((padded,), jnp.int32), layout)
        scratch.counts[own] = lax.fori_loop(0, tokens, pass_token, none)
        self._sync(scratch.counted)

    def _chosen(self, i: Any, scratch: _Scratch, own: Any, shape: tuple[int, ...]) -> jax.Array:
        """A choice of each token, for every expert."""
        chosen = plgpu.load(scratch.chosen.at[own, i], layout=_OF_TOKENS, optimized=False)
        return lax.broadcast_in_dim(chosen, shape, [0])

    def _begin(self, outs: _Outs, scratch: _Scratch, own: Any) -> None:
        """Where an expert's rows of this warpgroup begin; the first warpgroup writes down the tiles too."""
        padded = _padded(self.routing.num_experts)
        layout = plgpu.Layout.WG_STRIDED((padded,), vec_size=1)
        number = plgpu.broadcasted_iota(jnp.int32, (padded,), 0, layout=layout)
        count = before = plgpu.layout_cast(jnp.zeros((padded,), jnp.int32), layout)
        for other in range(self.warpgroups):
            theirs = plgpu.load(scratch.counts.at[other], layout=layout, optimized=False)
            count += theirs
            before += theirs * jnp.where(other < own, 1, 0)
        num_tiles = (count + (self.block_rows - 1)) // self.block_rows
        room = scratch.room.at[own]
        room[0] = (count + (GROUP - 1)) // GROUP * GROUP
        room[1] = num_tiles
        self._sync(scratch.arrived.at[own])

        def pass_expert(expert, sums):
            begin, first_tile, all_tiles = sums
            slots, tiles_of_it = room[0, expert], room[1, expert]
            later = number > expert
            return (
                begin + jnp.where(later, slots, 0),
                first_tile + jnp.where(later, tiles_of_it, 0),
                all_tiles + tiles_of_it,
            )

        none = plgpu.layout_cast(jnp.zeros((padded,), jnp.int32), layout)
        begin, first_tile, all_tiles = lax.fori_loop(
            0, self.routing.num_experts, pass_expert, (none, none, jnp.int32(0))
        )
        scratch.begins[own] = begin + before
        self._sync(scratch.begun.at[own])

        @pl.when(own == 0)
        def write_tiles():
            outs.num_tiles[0] = all_tiles
            for tile in range(pl.cdiv(self.num_tokens, self.block_rows)):
                place = jnp.where(tile < num_tiles, (first_tile + tile) * 3, -3)
                rows = jnp.minimum(count - tile * self.block_rows, self.block_rows)
                for field, value in enumerate((number, begin + tile * self.block_rows, rows)):
                    scatter(outs.work, place + field, value, layout)

    def _place(self, outs: _Outs, scratch: _Scratch, own: Any) -> None:
        """Each row's slot, and the row that a slot has."""
        shape = (_TOKENS, _padded(self.routing.num_experts))
        begins = plgpu.load(scratch.begins.at[own], layout=_OF_EXPERTS, optimized=False)
        slot_of = plgpu.load(scratch.logits_and_table[1].at[own], layout=_WGMMA, optimized=False)
        slot_of += lax.broadcast_in_dim(begins, shape, [1])
        number = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_WGMMA)
        token = plgpu.broadcasted_iota(jnp.int32, (_TOKENS,), 0, layout=_OF_TOKENS) + own * _TOKENS

        @self._for_each_choice
        def place(i):
            mine = number == self._chosen(i, scratch, own, shape)
            # No expert has no slot: the sum is 0 there.
            slot = jnp.where(mine, slot_of + 1, 0).sum(axis=1) - 1
            outs.slots[i, pl.ds(own * _TOKENS, _TOKENS)] = slot
            row = token * self.routing.per_token + i if self.rows_of_choices else token
            scatter(outs.sources, slot, row, _OF_TOKENS)

    def _sync(self, barrier: Any) -> None:
        """What was written to shared memory before it is read after it."""
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
