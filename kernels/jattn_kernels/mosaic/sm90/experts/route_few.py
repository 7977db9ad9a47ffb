"""Routing and the order of rows of few tokens on Hopper: one warpgroup, in which nothing is as long as its barriers.

choice    a warp a token, its scores spread over the lanes: the best of them by maxima of integers over the warp
order     of each row of the mixture against every other, in the 64 x 64 pairs of a product's layout: how many tokens
          before it go to its expert, and what room the experts of lower numbers take
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from jattn_kernels.lowering.expert_groups import GROUP, ExpertGroups, most_slots, most_tiles
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.indexed import scatter
from jattn_kernels.mosaic.sm90.experts.warp_choice import LANES, by_experts, choose_by_warps
from jattn_kernels.routing_spec import Routing

_ROWS = 64  # of the mixture, at most: each against every other
_MOST_SCORES = 64 * 128  # 64 a thread
_TILES = 2**16  # what a tile counts where slots and tiles are in one number
_PAIRS = plgpu.Layout.WGMMA
_OF_ROWS, _OF_OTHERS = _PAIRS.reduce(1), _PAIRS.reduce(0)


def token_rows(num_tokens: int) -> int:
    """Rows of logits for so many tokens: a whole number for each warp."""
    return pl.cdiv(num_tokens, tiles.WARPS) * tiles.WARPS


def fits(routing: Routing, num_tokens: int) -> bool:
    """Whether the tokens are few enough, and the scores of one fill a warp."""
    tokens = token_rows(num_tokens)
    few = tokens * routing.choices <= _ROWS and tokens * routing.num_experts <= _MOST_SCORES
    return few and routing.num_experts % LANES == 0


def route_and_group_few(
    routing: Routing,
    parts: Float32[Array, "S R E"],
    bias: Float32[Array, " E"] | None,
    *,
    num_tokens: int,
    block_rows: int,
    rows_of_choices: bool = False,
) -> tuple[Float32[Array, "k T"], ExpertGroups]:
    """The weights of the experts chosen here, a row a choice, and the groups, as `group_by_expert` has them.

    Args:
        parts: Logits are the sum of them; `token_rows` of each, or more.
    """
    per_token, num_experts, tokens = routing.choices, routing.all_experts, token_rows(num_tokens)
    assert parts.shape[1] >= tokens
    most = most_tiles(num_tokens, per_token, num_experts, block_rows)
    body = _Body(routing, num_tokens, tokens, block_rows, rows_of_choices)
    run = launch.kernel(
        body.block,
        out_type=[
            jax.ShapeDtypeStruct((per_token, tokens), jnp.float32),
            jax.ShapeDtypeStruct((_ROWS,), jnp.int32),
            jax.ShapeDtypeStruct((most_slots(num_tokens, per_token, num_experts),), jnp.int32),
            jax.ShapeDtypeStruct((most * 3,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ],
        grid=(1,),
        grid_names=("block",),
        kernel_name="route_few",
    )
    weights, slots, sources, work, num_tiles = run(parts) if bias is None else run(parts, bias)
    slots = slots[: per_token * tokens].reshape(per_token, tokens)
    return weights[:, :num_tokens], ExpertGroups(slots[:, :num_tokens], sources, work.reshape(most, 3), num_tiles)


class _Outs(NamedTuple):
    weights: Any
    slots: Any
    sources: Any
    work: Any
    num_tiles: Any


class _Scratch(NamedTuple):
    scores: Any  # (k, tokens): of the chosen experts
    # (2, 64): of each row, a choice of all tokens after the other; -1 of none. Twice, as Mosaic would take two loads of
    # one place for one value, of one layout.
    chosen: Any
    room: Any  # (64,): slots and tiles of the row's expert, in one number; 0 but for the first of its rows


@dataclasses.dataclass(frozen=True)
class _Body:
    routing: Routing
    num_tokens: int
    tokens: int  # rows of logits
    block_rows: int
    rows_of_choices: bool

    def block(self, parts_ref: Any, *refs: Any) -> None:
        bias_ref, outs = refs[0] if len(refs) > len(_Outs._fields) else None, _Outs(*refs[-len(_Outs._fields) :])
        scratch = _Scratch(
            scores=plgpu.SMEM((self.routing.per_token, self.tokens), jnp.float32),
            chosen=plgpu.SMEM((2, _ROWS), jnp.int32),
            room=plgpu.SMEM((_ROWS,), jnp.int32),
        )

        def run(scratch: _Scratch) -> None:
            self._choose(parts_ref, bias_ref, outs, scratch)
            self._order(outs, scratch)

        pl.run_scoped(run, scratch, collective_axes="warpgroup")

    def _choose(self, parts_ref: Any, bias_ref: Any, outs: _Outs, scratch: _Scratch) -> None:
        """A token's experts, the best first; their weights go where they belong."""
        routing, layout = self.routing, by_experts(self.routing)
        shape = (self.tokens, routing.num_experts)
        count, rows, _ = parts_ref.shape
        whole = count == 1 and rows == self.tokens
        refs = [parts_ref.at[i] if whole else parts_ref.at[i, pl.ds(0, self.tokens)] for i in range(count)]
        parts = [plgpu.load(ref, layout=layout, optimized=False) for ref in refs]
        logits = sum(parts[1:], parts[0])
        number = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        token = plgpu.broadcasted_iota(jnp.int32, (self.tokens,), 0, layout=layout.reduce(1))
        if self.tokens * routing.choices < _ROWS:
            for copy in range(2):
                scratch.chosen[copy] = plgpu.layout_cast(jnp.full((_ROWS,), -1, jnp.int32), _OF_ROWS)
            plgpu.commit_smem()

        def keep(i, first):
            for copy in range(2):
                rows = pl.ds(i * self.tokens, self.tokens)
                scratch.chosen[copy, rows] = jnp.where(token < self.num_tokens, first, -1)

        choose_by_warps(routing, logits, number, bias_ref, scratch.scores, outs.weights, keep)

    def _order(self, outs: _Outs, scratch: _Scratch) -> None:
        """Each row's slot, the row that a slot has, and the tiles."""
        shape, per_token = (_ROWS, _ROWS), self.routing.choices
        own = plgpu.load(scratch.chosen.at[0], layout=_OF_ROWS, optimized=False)
        others = plgpu.load(scratch.chosen.at[1], layout=_OF_OTHERS, optimized=False)

        def of_pairs(numbers, axis):
            return plgpu.layout_cast(lax.broadcast_in_dim(numbers, shape, [axis]), _PAIRS)

        def summed(numbers):
            return plgpu.layout_cast(numbers.sum(axis=1), _OF_ROWS)

        expert, other = of_pairs(own, 0), of_pairs(others, 1)
        token, other_token = (
            plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_PAIRS) % self.tokens for axis in range(2)
        )
        is_same = expert == other
        before = summed(jnp.where(is_same & (other_token < token), 1, 0))
        count = summed(jnp.where(is_same, 1, 0))
        slots = (count + (GROUP - 1)) // GROUP * GROUP
        num_tiles = (count + (self.block_rows - 1)) // self.block_rows
        is_first = (before == 0) & (own >= 0)
        scratch.room[...] = jnp.where(is_first, slots + num_tiles * _TILES, 0)
        plgpu.commit_smem()
        room = of_pairs(plgpu.load(scratch.room, layout=_OF_OTHERS, optimized=False), 1)
        earlier = summed(jnp.where(other < expert, room, 0))
        begin, first_tile = earlier % _TILES, earlier // _TILES
        slot = jnp.where(own < 0, -1, begin + before)
        outs.slots[...] = slot
        row = plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=_OF_ROWS)
        source = row % self.tokens
        if self.rows_of_choices:
            source = source * per_token + row // self.tokens
        scatter(outs.sources, slot, source, _OF_ROWS)
        scatter(outs.num_tiles, jnp.where(row == 0, 0, -1), summed(room) // _TILES, _OF_ROWS)
        for tile in range(pl.cdiv(self.num_tokens, self.block_rows)):
            place = jnp.where(is_first & (num_tiles > tile), (first_tile + tile) * 3, -3)
            rows = jnp.minimum(count - tile * self.block_rows, self.block_rows)
            for field, value in enumerate((own, begin + tile * self.block_rows, rows)):
                scatter(outs.work, place + field, value, _OF_ROWS)
