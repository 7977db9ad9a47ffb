"""The order of rows on Hopper: the choice of experts, if it is to be made, and where the rows of each expert stand.

one block: warpgroups of 64 tokens each
  choice        as in `choice`
  counts        of an expert those bits that are set, one for each token that goes to it
  slots         where each expert's rows begin, the others' rows before; a token's own behind those of lower bits

All of it is integer arithmetic, so that the order is always the same.
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
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.indexed import gather, scatter, set_bits
from jattn_kernels.mosaic.sm90.experts.choice import (
    OF_EXPERTS,
    OF_TOKENS,
    TOKENS,
    ChoiceScratch,
    choose_block,
    keep_choice,
    whole_groups,
)
from jattn_kernels.routing_spec import Routing

_THREADS = 128
_BITS = 32  # of a word
_WORDS = TOKENS // _BITS
_TILES = 2**16  # what a tile counts where slots and tiles are in one number; a block has fewer slots
_MOST_SCORES = 512  # experts times warpgroups: what one block has registers and shared memory for
_WGMMA = plgpu.Layout.WGMMA


def fits(num_tokens: int, num_experts: int, shared: int = 0) -> bool:
    """Whether one block can order so many tokens.

    Args:
        shared: Experts beside the others.
    """
    scores = _padded(num_experts + shared) * pl.cdiv(num_tokens, TOKENS)
    return num_experts % GROUP == 0 and scores <= _MOST_SCORES


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
    logits: Any  # (warpgroups, 64, E)
    tokens: Any  # (warpgroups, 2 * E_padded): bits of an expert's first 32 tokens, then of the others
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
    operands = operands._replace(logits=whole_groups(operands.logits))
    return _run(routing, operands, num_tokens, block_rows, rows_of_choices)


def group_chosen(
    routing: Routing, chosen: Int32[Array, "k T"], *, block_rows: int, rows_of_choices: bool = False
) -> ExpertGroups:
    """The groups of a choice that is made, a row a choice."""
    num_tokens = chosen.shape[1]
    by_choice = jnp.pad(chosen, ((0, 0), (0, -num_tokens % TOKENS)))
    return _run(routing, RouteOperands(chosen=by_choice), num_tokens, block_rows, rows_of_choices)[1]


def _run(
    routing: Routing, operands: RouteOperands, num_tokens: int, block_rows: int, rows_of_choices: bool
) -> tuple[Float32[Array, "k T"], ExpertGroups]:
    per_token, num_experts = routing.choices, routing.all_experts
    warpgroups = pl.cdiv(num_tokens, TOKENS)
    by_choice = (per_token, warpgroups * TOKENS)
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
        padded, all_of = _padded(self.routing.all_experts), self.warpgroups
        scratch = _Scratch(
            logits=tiles.tile((all_of, TOKENS, self.routing.num_experts), jnp.float32),
            tokens=plgpu.SMEM((all_of, _WORDS * padded), jnp.int32),
            scores=plgpu.SMEM((all_of, self.routing.choices, TOKENS), jnp.float32),
            chosen=plgpu.SMEM((all_of, self.routing.choices, TOKENS), jnp.int32),
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
            given = operands.logits, operands.bias, outs.weights
            choose_block(self.routing, self.num_tokens, *given, self._of_choice(scratch, own), own)
        self._count(scratch, own)
        self._begin(outs, scratch, own)
        self._place(outs, scratch, own)

    def _of_choice(self, scratch: _Scratch, own: Any) -> ChoiceScratch:
        return ChoiceScratch(
            logits=scratch.logits.at[own],
            scores=scratch.scores.at[own],
            chosen=scratch.chosen.at[own],
            arrived=scratch.arrived.at[own],
        )

    def _for_each_choice(self, visit: Callable[[Any], None]) -> None:
        pl.loop(0, self.routing.choices)(visit)

    def _read_choice(self, operands: RouteOperands, scratch: _Scratch, own: Any) -> None:
        tokens = pl.ds(own * TOKENS, TOKENS)

        @self._for_each_choice
        def read(i):
            chosen = plgpu.load(operands.chosen.at[i, tokens], layout=OF_TOKENS, optimized=False)
            keep_choice(self.routing, self.num_tokens, i, chosen, self._of_choice(scratch, own), own)

    def _count(self, scratch: _Scratch, own: Any) -> None:
        """Who goes to an expert; and how many."""
        words, padded = scratch.tokens.at[own], _padded(self.routing.all_experts)
        token = plgpu.broadcasted_iota(jnp.int32, (TOKENS,), 0, layout=OF_TOKENS)
        layout = plgpu.Layout.WG_STRIDED((_WORDS * padded,), vec_size=1)
        words[...] = plgpu.layout_cast(jnp.zeros((_WORDS * padded,), jnp.int32), layout)
        plgpu.commit_smem()

        @self._for_each_choice
        def mark(i):
            chosen = plgpu.load(scratch.chosen.at[own, i], layout=OF_TOKENS, optimized=False)
            place = jnp.where(chosen < 0, -1, token // _BITS * padded + chosen)
            set_bits(words, place, 1 << token % _BITS, OF_TOKENS)

        plgpu.commit_smem()
        parts = [words.at[pl.ds(i * padded, padded)] for i in range(_WORDS)]
        scratch.counts[own] = sum(_ones(plgpu.load(part, layout=self._of_experts, optimized=False)) for part in parts)
        self._sync(scratch.counted)

    @property
    def _of_experts(self) -> Any:
        """Layout of a number an expert, some a thread."""
        return plgpu.Layout.WG_STRIDED((_padded(self.routing.all_experts),), vec_size=1)

    def _begin(self, outs: _Outs, scratch: _Scratch, own: Any) -> None:
        """Where an expert's rows of this warpgroup begin; the first warpgroup writes down the tiles too."""
        padded, layout = _padded(self.routing.all_experts), self._of_experts
        count = before = plgpu.layout_cast(jnp.zeros((padded,), jnp.int32), layout)
        for other in range(self.warpgroups):
            theirs = plgpu.load(scratch.counts.at[other], layout=layout, optimized=False)
            count += theirs
            before += theirs * jnp.where(other < own, 1, 0)
        num_tiles = (count + (self.block_rows - 1)) // self.block_rows
        slots = (count + (GROUP - 1)) // GROUP * GROUP
        scratch.room[own] = slots + num_tiles * _TILES
        plgpu.commit_smem()
        room = plgpu.load(scratch.room.at[own], layout=OF_EXPERTS, optimized=False)
        shape = (TOKENS, padded)
        room = lax.broadcast_in_dim(room, shape, [1])
        earlier = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_WGMMA)
        expert = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA)

        @pl.loop(0, padded // TOKENS)
        def add_earlier(block):
            sums = jnp.where(earlier < expert + block * TOKENS, room, 0).sum(axis=1)
            scratch.first[own, pl.ds(block * TOKENS, TOKENS)] = sums

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
        words, padded = scratch.tokens.at[own], _padded(self.routing.all_experts)
        number = plgpu.broadcasted_iota(jnp.int32, (TOKENS,), 0, layout=OF_TOKENS)
        token, lower = number + own * TOKENS, (1 << number % _BITS) - 1
        lowers = jnp.where(number < _BITS, lower, -1), jnp.where(number < _BITS, 0, lower)

        @self._for_each_choice
        def place(i):
            chosen = plgpu.load(scratch.chosen.at[own, i], layout=OF_TOKENS, optimized=False)
            slot = gather(scratch.begins.at[own], chosen, OF_TOKENS)
            for word, before in enumerate(lowers):
                slot += _ones(gather(words, chosen + word * padded, OF_TOKENS) & before)
            slot = jnp.where(chosen < 0, -1, slot)
            outs.slots[i, pl.ds(own * TOKENS, TOKENS)] = slot
            row = token * self.routing.choices + i if self.rows_of_choices else token
            scatter(outs.sources, slot, row, OF_TOKENS)

    def _sync(self, barrier: Any) -> None:
        """What was written to shared memory before it is read after it."""
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)


def _ones(words: jax.Array) -> jax.Array:
    """How many bits are set in each word."""
    pairs = words - (lax.shift_right_logical(words, 1) & 0x55555555)
    fours = (pairs & 0x33333333) + (lax.shift_right_logical(pairs, 2) & 0x33333333)
    bytes_ = (fours + lax.shift_right_logical(fours, 4)) & 0x0F0F0F0F
    return lax.shift_right_logical(bytes_ * 0x01010101, 24)
