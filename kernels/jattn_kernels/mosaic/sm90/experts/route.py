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
from jattn_kernels.mosaic.sm90.experts.indexed import gather, scatter
from jattn_kernels.routing_spec import Routing

_TOKENS = 64  # of a warpgroup
_THREADS = 128
_WALK = 8  # rows of the table that a thread has under way
_TILES = 2**16  # what a tile counts where slots and tiles are in one number; a block has fewer slots
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
    logits_and_table: Any  # (warpgroups, 64, E) float32, then (warpgroups, 64 * E_padded) int32
    scores: Any  # (warpgroups, k, 64): of the chosen experts
    chosen: Any  # (warpgroups, k, 64)
    counts: Any  # (warpgroups, E_padded): of a warpgroup's tokens
    begins: Any  # (warpgroups, E_padded): where a warpgroup's rows of an expert begin
    room: Any  # (warpgroups, E_padded): slots and tiles of an expert, in one number
    first: Any  # (warpgroups, E_padded): of those of earlier experts
    arrived: Any
    counted: Any


def route_and_group(
    routing: Routing, operands: RouteOperands, *, num_tokens: int, block_rows: int, rows_of_choices: bool = False
) -> tuple[Float32[Array, "k T"], ExpertGroups]:
    """The weights of the experts chosen here, a row a choice, and the groups, as `group_by_expert` has them."""
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
) -> tuple[Float32[Array, "k T"], ExpertGroups]:
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
    groups = ExpertGroups(slots[:, :num_tokens], sources, work.reshape(most, 3), num_tiles)
    return weights[:, :num_tokens], groups


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
                tiles.tile((all_of, _TOKENS, self.routing.num_experts), jnp.float32),
                plgpu.SMEM((all_of, _TOKENS * padded), jnp.int32),
            ),
            scores=plgpu.SMEM((all_of, self.routing.per_token, _TOKENS), jnp.float32),
            chosen=plgpu.SMEM((all_of, self.routing.per_token, _TOKENS), jnp.int32),
            counts=plgpu.SMEM((all_of, padded), jnp.int32),
            begins=plgpu.SMEM((all_of, padded), jnp.int32),
            room=plgpu.SMEM((all_of, padded), jnp.int32),
            first=plgpu.SMEM((all_of, padded), jnp.int32),
            arrived=plgpu.Barrier(num_barriers=all_of),
            counted=plgpu.Barrier(num_arrivals=all_of),
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
        logits = plgpu.load(as_copied, layout=_WGMMA)
        plgpu.commit_smem()  # the table takes its place
        # float32 holds an expert's number; a minimum is a maximum of what is negative.
        negative_number = -plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_WGMMA).astype(jnp.float32)

        def spread(of_tokens):
            return lax.broadcast_in_dim(of_tokens, shape, [0])

        most = logits.max(axis=1)

        def score_of(logits, most):
            return jax.nn.sigmoid(logits) if routing.scoring == "sigmoid" else jnp.exp(logits - most)

        all_scores = score_of(logits, spread(most)).sum(axis=1) if routing.scoring == "softmax" else most
        merit, scores = logits, None
        if operands.bias is not None:
            scores = score_of(logits, spread(most))
            if routing.scoring == "softmax":
                scores = scores / spread(all_scores)
                all_scores = jnp.ones_like(all_scores)
            bias = plgpu.load(operands.bias, layout=_OF_EXPERTS, optimized=False)
            merit = scores + lax.broadcast_in_dim(bias, shape, [1])

        def choose_next(i, carry):
            merit, total = carry
            best = merit.max(axis=1)
            first = -jnp.where(merit == spread(best), negative_number, -jnp.inf).max(axis=1)
            first = jnp.minimum(first, float(routing.num_experts - 1))
            is_first = negative_number == spread(-first)
            score = score_of(best, most) if scores is None else jnp.where(is_first, scores, 0.0).sum(axis=1)
            scratch.scores[own, i] = score
            self._keep_choice(i, first.astype(jnp.int32), scratch, own)
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
        table, padded = scratch.logits_and_table[1].at[own], _padded(self.routing.num_experts)
        wide = plgpu.Layout.WG_STRIDED((padded * _WALK,), vec_size=4)
        num_tokens = jnp.minimum(self.num_tokens - own * _TOKENS, _TOKENS)

        @pl.loop(0, _TOKENS // _WALK)
        def clear(part):
            nothing = plgpu.layout_cast(jnp.zeros((padded * _WALK,), jnp.int32), wide)
            table[pl.ds(part * padded * _WALK, padded * _WALK)] = nothing

        plgpu.commit_smem()

        @self._for_each_choice
        def mark(i):
            place = self._place_in_table(i, scratch, own)
            scatter(table, place, 1, _OF_TOKENS)

        plgpu.commit_smem()

        def pass_tokens(step, before):
            rows = [pl.ds((step * _WALK + i) * padded, padded) for i in range(_WALK)]
            goes = [plgpu.load(table.at[row], layout=self._of_experts, optimized=False) for row in rows]
            for row, each in zip(rows, goes, strict=True):
                table[row] = before
                before += each
            return before

        none = plgpu.layout_cast(jnp.zeros((padded,), jnp.int32), self._of_experts)
        scratch.counts[own] = lax.fori_loop(0, lax.div(num_tokens + _WALK - 1, _WALK), pass_tokens, none)
        self._sync(scratch.counted)

    @property
    def _of_experts(self) -> Any:
        """Layout of a number an expert, some a thread."""
        return plgpu.Layout.WG_STRIDED((_padded(self.routing.num_experts),), vec_size=1)

    def _place_in_table(self, i: Any, scratch: _Scratch, own: Any) -> jax.Array:
        """Where a choice of each token stands in the table; below 0 for that of no expert."""
        chosen = plgpu.load(scratch.chosen.at[own, i], layout=_OF_TOKENS, optimized=False)
        token = plgpu.broadcasted_iota(jnp.int32, (_TOKENS,), 0, layout=_OF_TOKENS)
        return jnp.where(chosen < 0, -1, token * _padded(self.routing.num_experts) + chosen)

    def _begin(self, outs: _Outs, scratch: _Scratch, own: Any) -> None:
        """Where an expert's rows of this warpgroup begin; the first warpgroup writes down the tiles too."""
        padded, layout = _padded(self.routing.num_experts), self._of_experts
        count = before = plgpu.layout_cast(jnp.zeros((padded,), jnp.int32), layout)
        for other in range(self.warpgroups):
            theirs = plgpu.load(scratch.counts.at[other], layout=layout, optimized=False)
            count += theirs
            before += theirs * jnp.where(other < own, 1, 0)
        num_tiles = (count + (self.block_rows - 1)) // self.block_rows
        slots = (count + (GROUP - 1)) // GROUP * GROUP
        scratch.room[own] = slots + num_tiles * _TILES
        plgpu.commit_smem()
        room = plgpu.load(scratch.room.at[own], layout=_OF_EXPERTS, optimized=False)
        shape = (_TOKENS, padded)
        room = lax.broadcast_in_dim(room, shape, [1])
        earlier = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_WGMMA)
        expert = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA)

        @pl.loop(0, padded // _TOKENS)
        def add_earlier(block):
            sums = jnp.where(earlier < expert + block * _TOKENS, room, 0).sum(axis=1)
            scratch.first[own, pl.ds(block * _TOKENS, _TOKENS)] = sums

        plgpu.commit_smem()
        first = plgpu.load(scratch.first.at[own], layout=layout, optimized=False)
        begin, first_tile = first % _TILES, first // _TILES
        scratch.begins[own] = begin + before
        plgpu.commit_smem()

        @pl.when(own == 0)
        def write_tiles():
            number = plgpu.broadcasted_iota(jnp.int32, (padded,), 0, layout=layout)
            is_last = number == padded - 1
            scatter(outs.num_tiles, jnp.where(is_last, 0, -1), first_tile + num_tiles, layout)

            @pl.loop(0, pl.cdiv(self.num_tokens, self.block_rows))
            def write(tile):
                place = jnp.where(num_tiles > tile, (first_tile + tile) * 3, -3)
                rows = jnp.minimum(count - tile * self.block_rows, self.block_rows)
                for field, value in enumerate((number, begin + tile * self.block_rows, rows)):
                    scatter(outs.work, place + field, value, layout)

    def _place(self, outs: _Outs, scratch: _Scratch, own: Any) -> None:
        """Each row's slot, and the row that a slot has."""
        token = plgpu.broadcasted_iota(jnp.int32, (_TOKENS,), 0, layout=_OF_TOKENS) + own * _TOKENS

        @self._for_each_choice
        def place(i):
            chosen = plgpu.load(scratch.chosen.at[own, i], layout=_OF_TOKENS, optimized=False)
            slot = gather(scratch.logits_and_table[1].at[own], self._place_in_table(i, scratch, own), _OF_TOKENS)
            slot = jnp.where(chosen < 0, -1, slot + gather(scratch.begins.at[own], chosen, _OF_TOKENS))
            outs.slots[i, pl.ds(own * _TOKENS, _TOKENS)] = slot
            row = token * self.routing.per_token + i if self.rows_of_choices else token
            scatter(outs.sources, slot, row, _OF_TOKENS)

    def _sync(self, barrier: Any) -> None:
        """What was written to shared memory before it is read after it."""
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
