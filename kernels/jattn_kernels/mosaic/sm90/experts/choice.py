"""The choice of experts on Hopper: 64 tokens a warpgroup, a token's scores in the registers of four neighbours.

`per_token` times the best expert that is left, by two reductions over the experts. Of two equal scores the one of the
lower number is the better. Experts that all tokens go to are the first choices.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from jattn_kernels.lowering.expert_groups import GROUP
from jattn_kernels.lowering.routing import LEAST_SUM
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.routing_spec import Routing

TOKENS = 64  # of a warpgroup
OF_TOKENS, OF_EXPERTS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
_MOST_EXPERTS = 512  # whose scores the registers of a warpgroup hold
_LEAST = float(jnp.finfo(jnp.float32).min)


def chooses(routing: Routing, *, is_biased: bool) -> bool:
    """Whether the kernels make the choice; that of groups comes from XLA."""
    by_logits = routing.scoring == "softmax_of_chosen"
    fits = routing.num_experts % GROUP == 0 and routing.num_experts <= _MOST_EXPERTS
    return fits and routing.groups_per_token == routing.num_groups and not (by_logits and is_biased)


def factor_of(routing: Routing, of_chosen: jax.Array, of_all: jax.Array) -> jax.Array:
    """What each token's scores are multiplied with to be weights.

    Args:
        of_chosen, of_all: The sum of its chosen experts' scores, and of all experts'.
    """
    if by_chosen(routing):
        return routing.scaling_factor / (of_chosen + LEAST_SUM)
    if routing.scoring == "softmax":
        return routing.scaling_factor / of_all
    return jnp.full_like(of_chosen, routing.scaling_factor)


def by_chosen(routing: Routing) -> bool:
    """Whether weights are shares of the chosen experts' scores."""
    return routing.normalised or routing.scoring == "softmax_of_chosen"


class ChoiceScratch(NamedTuple):
    """Shared memory of a warpgroup.

    Attributes:
        logits: (64, experts), tiled.
        scores: (choices, 64): of the chosen experts, in rows of the first ones.
        chosen: (choices, 64); -1 where there is no token.
        arrived: Barrier of the logits.
    """

    logits: Any
    scores: Any
    chosen: Any
    arrived: Any


def scratch_of(routing: Routing) -> ChoiceScratch:
    """What to allocate for one warpgroup."""
    by_choice = (routing.choices, TOKENS)
    return ChoiceScratch(
        logits=tiles.tile((TOKENS, routing.num_experts), jnp.float32),
        scores=plgpu.SMEM(by_choice, jnp.float32),
        chosen=plgpu.SMEM(by_choice, jnp.int32),
        arrived=plgpu.Barrier(),
    )


def whole_groups(logits: Float32[Array, "T E"]) -> Float32[Array, "T_padded E"]:
    """Logits in as many rows as Mosaic copies: fewer than 8, or whole groups of 8."""
    rows = logits.shape[0]
    return jnp.pad(logits, ((0, -rows % GROUP if rows > GROUP else 0), (0, 0)))


def choose_experts(
    routing: Routing, logits: Float32[Array, "T E"], bias: Float32[Array, " E"] | None
) -> tuple[Float32[Array, "k T"], Int32[Array, "k T"]]:
    """The weights and the numbers of each token's experts, a row a choice: a block for 64 tokens."""
    num_tokens = logits.shape[0]
    blocks = pl.cdiv(num_tokens, TOKENS)
    by_choice = (routing.choices, blocks * TOKENS)

    def body(*refs):
        logits, bias, (weights, chosen) = refs[0], None if len(refs) == 3 else refs[1], refs[-2:]
        block = lax.axis_index("block")

        def choose(scratch):
            choose_block(routing, num_tokens, logits, bias, weights, scratch, block)

            @pl.loop(0, routing.choices)
            def write(i):
                chosen[i, pl.ds(block * TOKENS, TOKENS)] = plgpu.load(
                    scratch.chosen.at[i], layout=OF_TOKENS, optimized=False
                )

        pl.run_scoped(choose, scratch_of(routing), collective_axes="warpgroup")

    run = launch.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(by_choice, jnp.float32), jax.ShapeDtypeStruct(by_choice, jnp.int32)],
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="choose_experts",
    )
    given = whole_groups(logits)
    weights, chosen = run(given) if bias is None else run(given, bias)
    return weights[:, :num_tokens], chosen[:, :num_tokens]


def keep_choice(
    routing: Routing, num_tokens: int, i: Any, chosen: jax.Array, scratch: ChoiceScratch, block: Any
) -> None:
    """A choice of each token of a block; of no token and of no expert it is -1."""
    token = plgpu.broadcasted_iota(jnp.int32, (TOKENS,), 0, layout=OF_TOKENS) + block * TOKENS
    real = (token < num_tokens) & (chosen >= 0) & (chosen < routing.all_experts)
    scratch.chosen[i] = jnp.where(real, chosen, -1)


def choose_block(
    routing: Routing,
    num_tokens: int,
    logits_ref: Any,
    bias_ref: Any,
    weights_ref: Any,
    scratch: ChoiceScratch,
    block: Any,
) -> None:
    """The choice of a block of tokens, kept in `scratch.chosen`; their weights go where they belong."""
    shape, tokens = (TOKENS, routing.num_experts), pl.ds(block * TOKENS, TOKENS)
    plgpu.copy_gmem_to_smem(logits_ref.at[tokens], scratch.logits, scratch.arrived)
    plgpu.barrier_wait(scratch.arrived)
    logits = plgpu.load(scratch.logits, layout=plgpu.Layout.WGMMA)
    plgpu.commit_smem()  # another may take their place
    # float32 holds an expert's number; a minimum is a maximum of what is negative.
    negative_number = -plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA).astype(jnp.float32)

    def spread(of_tokens):
        return lax.broadcast_in_dim(of_tokens, shape, [0])

    most = logits.max(axis=1)

    def score_of(logits, most):
        return jax.nn.sigmoid(logits) if routing.scoring == "sigmoid" else jnp.exp(logits - most)

    all_scores = score_of(logits, spread(most)).sum(axis=1) if routing.scoring == "softmax" else most
    merit, scores = logits, None
    if bias_ref is not None:
        scores = score_of(logits, spread(most))
        if routing.scoring == "softmax":
            scores = scores / spread(all_scores)
            all_scores = jnp.ones_like(all_scores)
        bias = plgpu.load(bias_ref, layout=OF_EXPERTS, optimized=False)
        merit = scores + lax.broadcast_in_dim(bias, shape, [1])

    merit = jnp.maximum(merit, _LEAST)  # the experts that are taken alone are below

    def choose_next(i, carry):
        merit, total = carry
        best = merit.max(axis=1)
        first = -jnp.where(merit == spread(best), negative_number, -jnp.inf).max(axis=1)
        first = jnp.minimum(first, float(routing.num_experts - 1))
        is_first = negative_number == spread(-first)
        score = score_of(best, most) if scores is None else jnp.where(is_first, scores, 0.0).sum(axis=1)
        scratch.scores[i] = score
        keep_choice(routing, num_tokens, behind_shared(routing, i), first.astype(jnp.int32), scratch, block)
        return jnp.where(is_first, -jnp.inf, merit), total + score

    none = plgpu.layout_cast(jnp.zeros((TOKENS,), jnp.float32), OF_TOKENS)
    _, of_chosen = lax.fori_loop(0, routing.per_token, choose_next, (merit, none))
    factor = factor_of(routing, of_chosen, all_scores)
    for number in range(routing.shared):
        expert = jnp.full((TOKENS,), routing.num_experts + number, jnp.int32)
        keep_choice(routing, num_tokens, number, plgpu.layout_cast(expert, OF_TOKENS), scratch, block)
        weights_ref[number, tokens] = plgpu.layout_cast(jnp.ones((TOKENS,), jnp.float32), OF_TOKENS)

    plgpu.commit_smem()

    @pl.loop(0, routing.per_token)
    def weigh(i):
        score = plgpu.load(scratch.scores.at[i], layout=OF_TOKENS, optimized=False)
        weights_ref[behind_shared(routing, i), tokens] = score * factor


def behind_shared(routing: Routing, choice: Any) -> Any:
    """The place of one of the chosen experts among all that a token goes to."""
    return choice + routing.shared if routing.shared else choice
