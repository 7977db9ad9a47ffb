"""The choice of experts by warps: a token's scores are spread over lanes, and the best found by maxima of integers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.indexed import store_at
from jattn_kernels.mosaic.sm90.experts.choice import behind_shared, by_chosen, factor_of
from jattn_kernels.routing_spec import Routing

LANES = 32
_THREADS, _KEYS_AT_ONCE = 128, 16
_TAKEN = jnp.iinfo(jnp.int32).min


def by_experts(routing: Routing) -> Any:
    """Layout of a row a warp, its numbers spread over the lanes."""
    tiling = plgpu.Tiling(((tiles.WARPS, routing.num_experts), (routing.num_experts // LANES,)))
    return plgpu.Layout.TILED(tiling, (-3,), (-2,), -1)


def choose_by_warps(
    routing: Routing,
    logits: jax.Array,
    number: jax.Array,
    bias_ref: Any,
    scores_ref: Any,
    weights_ref: Any,
    keep: Callable[[Any, jax.Array], None],
) -> None:
    """A warpgroup's tokens' experts, the best first behind those that all go to; their weights go where they belong.

    Args:
        logits: A row a token, of the layout `by_experts`.
        number: Of each expert, likewise.
        scores_ref: Shared memory for what is found, a row a choice, from the first on.
        weights_ref: Where the weights go, a row a choice.
        keep: Takes each choice of all tokens; all of it is in shared memory for who waits for the warpgroup.
    """
    layout, shape = by_experts(routing), logits.shape

    def spread(of_tokens):
        return lax.broadcast_in_dim(of_tokens, shape, [0])

    key = _key(logits)
    most = _of_key(key.max(axis=1))

    def score_of(logits, most):
        return jax.nn.sigmoid(logits) if routing.scoring == "sigmoid" else jnp.exp(logits - most)

    scores, total = None, most
    if bias_ref is not None:
        scores = score_of(logits, spread(most))
        if routing.scoring == "softmax":
            scores = scores / spread(scores.sum(axis=1))
            total = jnp.ones_like(most)
        bias = plgpu.load(bias_ref, layout=layout.reduce(0), optimized=False)
        key = _key(scores + lax.broadcast_in_dim(bias, shape, [1]))
    elif routing.scoring == "softmax" and not by_chosen(routing):
        total = score_of(logits, spread(most)).sum(axis=1)

    negative = -number  # Mosaic has one instruction for a warp's maximum, and five shuffles for its minimum

    def choose_next(i, carry):
        key, of_chosen = carry
        best = key.max(axis=1)
        first = -jnp.where(key == spread(best), negative, -routing.num_experts).max(axis=1)
        is_first = number == spread(first)
        if scores is None:
            score = score_of(_of_key(best), most)
        else:
            score = jnp.where(is_first, scores, 0.0).sum(axis=1)
        scores_ref[i] = score
        keep(behind_shared(routing, i), first)
        return jnp.where(is_first, _TAKEN, key), of_chosen + score

    none = plgpu.layout_cast(jnp.zeros((shape[0],), jnp.float32), layout.reduce(1))
    _, of_chosen = lax.fori_loop(0, routing.per_token, choose_next, (key, none))
    factor = factor_of(routing, of_chosen, total)
    for shared in range(routing.shared):
        keep(
            shared, plgpu.layout_cast(jnp.full((shape[0],), routing.num_experts + shared, jnp.int32), layout.reduce(1))
        )
    plgpu.commit_smem()

    @pl.loop(0, routing.per_token)
    def weigh(i):
        score = plgpu.load(scores_ref.at[i], layout=layout.reduce(1), optimized=False)
        weights_ref[behind_shared(routing, i)] = score * factor

    for shared in range(routing.shared):
        weights_ref[shared] = plgpu.layout_cast(jnp.ones((shape[0],), jnp.float32), layout.reduce(1))


def _key(numbers: jax.Array) -> jax.Array:
    """Integers in the order of float32 numbers, 0 and -0 equal; none is as low as what is taken."""
    bits = lax.bitcast_convert_type(jnp.where(numbers == 0, 0.0, numbers), jnp.int32)
    return jnp.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _TAKEN + 1)


def _of_key(keys: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(keys ^ ((keys >> 31) & 0x7FFFFFFF), jnp.float32)


def choose_for_one(
    routing: Routing, logits: Callable[[jax.Array], jax.Array], bias: Any, scores: Any, weights: Any, experts: Any
) -> None:
    """One token's experts and their weights.

    Args:
        logits: Of the numbers of experts, of the layout `by_experts`; a row of them may be that of no token.
        bias: On the choice, or None.
        scores, weights, experts: (k, 4), where they are kept.
    """
    shape = tiles.WARPS, routing.num_experts
    number = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=by_experts(routing))

    def keep(i, expert):
        experts[i] = expert

    choose_by_warps(routing, logits(number), number, bias, scores, weights, keep)


def of_splits(parts: Any, number: jax.Array, layout: Any) -> jax.Array:
    """The logits that splits add up to, in their first row; the rows of the other warps are those of no token."""
    row = plgpu.broadcasted_iota(jnp.int32, number.shape, 0, layout=layout)
    of_parts = [plgpu.load(parts.at[i], layout=layout, optimized=False) for i in range(parts.shape[0])]
    return jnp.where(row == 0, sum(of_parts[1:], of_parts[0]), 0.0)


def ranks(routing: Routing, *, is_biased: bool) -> bool:
    """Whether `choose_by_rank` makes the choice: by softmax of what is ranked."""
    softmax = routing.scoring in ("softmax", "softmax_of_chosen")
    return softmax and not is_biased and routing.num_experts % _KEYS_AT_ONCE == 0


def choose_by_rank(
    routing: Routing,
    logits: Callable[[jax.Array, Any], jax.Array],
    keys: Any,
    scores: Any,
    weights: Any,
    experts: Any,
    known: Callable[[], None],
) -> None:
    """`choose_for_one`, by counting for each expert how many are better: in no turns that wait for each other.

    Args:
        logits: Of the numbers of experts, of this layout.
        keys: (`ranked_width`,), int32, in shared memory.
        known: Called once the experts are in shared memory, before their weights are.
    """
    shape = (ranked_width(routing),)
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=1)
    number = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    key = _key(logits(jnp.minimum(number, routing.num_experts - 1), layout))
    if shape[0] > routing.num_experts:
        key = jnp.where(number < routing.num_experts, key, _TAKEN)
    keys[...] = key
    plgpu.commit_smem()

    def compare(step: Any, rank: jax.Array) -> jax.Array:
        for i in range(_KEYS_AT_ONCE):
            other = step * _KEYS_AT_ONCE + i
            than = keys[other]
            is_better = (key < than) | ((key == than) & (number > other))
            rank += is_better.astype(jnp.int32)
        return rank

    none = plgpu.layout_cast(jnp.zeros(shape, jnp.int32), layout)
    rank = lax.fori_loop(0, routing.num_experts // _KEYS_AT_ONCE, compare, none)
    place = jnp.where(rank < routing.per_token, behind_shared(routing, rank) * tiles.WARPS, -1)
    store_at(experts, place, number, layout)
    if routing.shared:
        of_shared = jnp.where(number < routing.shared, number * tiles.WARPS, -1)
        store_at(experts, of_shared, number + routing.num_experts, layout)
    store_at(scores, place, _of_key(key), layout)
    plgpu.commit_smem()
    known()
    of_row = by_experts(routing).reduce(1)
    rows = [behind_shared(routing, i) for i in range(routing.per_token)]
    best = [plgpu.load(scores.at[row], layout=of_row, optimized=False) for row in rows]
    found = [jnp.exp(each - best[0]) for each in best]
    of_chosen = plgpu.layout_cast(jnp.zeros((tiles.WARPS,), jnp.float32), of_row)
    for score in found:
        of_chosen = of_chosen + score
    total = of_chosen
    if not by_chosen(routing):
        each = jnp.exp(_of_key(key) - scores[rows[0], 0])
        of_all = jnp.where(number < routing.num_experts, each, 0.0).sum()
        total = plgpu.layout_cast(jnp.full((tiles.WARPS,), of_all), of_row)
    factor = factor_of(routing, of_chosen, total)
    for row, score in zip(rows, found, strict=True):
        weights[row] = score * factor
    for row in range(routing.shared):
        weights[row] = plgpu.layout_cast(jnp.ones((tiles.WARPS,), jnp.float32), of_row)


def ranked_width(routing: Routing) -> int:
    """Numbers of experts, a thread's and more, that `choose_by_rank` compares."""
    return -(-routing.num_experts // _THREADS) * _THREADS
