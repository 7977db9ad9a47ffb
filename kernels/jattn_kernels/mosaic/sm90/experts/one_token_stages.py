"""What the phases of one token's mixture share: a ring of stages for all their weights, rows, and what is chosen."""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, UInt8

from jattn_kernels.mixture_operands import NextOperands, RouterOperands
from jattn_kernels.mosaic.sm90.common import all_blocks, tiles
from jattn_kernels.mosaic.sm90.common.columns import flat_places
from jattn_kernels.mosaic.sm90.common.indexed import scatter
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS, WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.warp_choice import ranked_width
from jattn_kernels.routing_spec import Routing

DEPTH = 128  # of a stage: a copy of 16 KB
STAGES = 11


class FewBitsWeights(NamedTuple):
    """Experts' weights of all layers, and which of these.

    Attributes:
        gate_up, gate_up_scales, gate_up_bias: The gate's outputs and the other half's apart, 32 together; biases one
            after the other.
        down, down_scales, down_bias: Likewise, of one part.
        layer: Of them.
    """

    gate_up: UInt8[Array, "LE 2 blocks 32 bytes"]
    gate_up_scales: UInt8[Array, "LE G 2 blocks 32"]
    gate_up_bias: Float[Array, " LE2U"] | None
    down: UInt8[Array, "LE blocks 32 bytes"]
    down_scales: UInt8[Array, "LE G blocks 32"]
    down_bias: Float[Array, " LED"] | None
    layer: Any


class OneTokenOperands(NamedTuple):
    """What the kernel reads.

    Attributes:
        x: The token; None where it is made of a sum.
        router: What it and its logits are made of, layers as arrays of one number. In the second row of what is added
            first, which is 0, blocks leave each other what they wait for.
        bias: On the choice of experts, or None.
        gate_up, down: Weights of all layers; None of few bits.
        layer: Which of them.
        next: Of a product that follows, or None.
        few_bits: Weights in mxfp4.
        attended, values, products, logits, hidden, total, parts: What phases leave to later ones, if another kernel has
            done them.
    """

    x: Float[Array, "1 D"] | None
    router: RouterOperands | None
    bias: Float32[Array, " E"] | None
    gate_up: Float[Array, "L A D F2"] | None
    down: Float[Array, "L A F D"] | None
    layer: Int[Array, "1"]
    attended: Float32[Array, "S _"] | None = None
    values: Float32[Array, "C A"] | None = None
    products: Float32[Array, "S D"] | None = None
    logits: Float32[Array, "S E"] | Float32[Array, "S 4 E"] | None = None
    hidden: Float[Array, "8 F"] | Float[Array, " kF"] | Float32[Array, "k R F"] | None = None
    total: Float[Array, "1 D"] | None = None
    parts: Float32[Array, "k R D"] | None = None
    next: NextOperands | None = None
    few_bits: FewBitsWeights | None = None


def left_parts(router: Any) -> Any:
    """The splits that are added first."""
    return router.norm.additions[0].parts


class Made(NamedTuple):
    """What phases store; None of those that another launch has.

    Attributes:
        attended, values, products, logits, hidden: For later phases.
        total: The token's sum.
        parts: What each expert returns, times its weight; then rows of 0.
        next: Splits of the product that follows, four rows each.
        k_pages, v_pages: With the token's key and value.
    """

    attended: Any = None
    values: Any = None
    products: Any = None
    logits: Any = None
    total: Any = None
    hidden: Any = None
    parts: Any = None
    next: Any = None
    k_pages: Any = None
    v_pages: Any = None


class Scratch(NamedTuple):
    """In shared memory."""

    kernel: Any  # (stages, 128, 64)
    x: Any  # (8, depth): the row of the phase's product
    scores: Any  # (k, 4)
    weights: Any  # (k, 4)
    experts: Any  # (k, 4)
    full: Any
    empty: Any
    chosen: Any
    attended_full: Any
    rows_full: Any
    hidden_full: Any
    total: Any  # (1, D)
    keys: Any  # (`ranked_width`,)
    q: Any = None  # (8, 128): of attention, as the others
    p: Any = None  # (8, 64), or (heads, 64)
    new: Any = None  # (2, 128)
    keys_full: Any = None
    queries_full: Any = None  # of latent rows
    few_bits: Any = None  # `FewBitsScratch`


class Count(NamedTuple):
    """By which blocks wait for each other (`all_blocks`); there is none in the interpreter, whose phases are launches.

    Attributes:
        place: In global memory.
    """

    place: Any = None

    def tell(self) -> None:
        """Of what the warpgroup has stored."""
        if self.place is not None:
            all_blocks.tell(self.place)

    def wait(self, most: int) -> None:
        """Until so many have told."""
        if self.place is not None:
            all_blocks.wait_for_all(self.place, most)


def scratch(
    row: int, columns: int, routing: Routing, dtype: Any, key_copies: int = 0, query_copies: int = 0, heads: int = 0
) -> Scratch:
    """For rows of so many numbers, and a token of so many.

    Args:
        key_copies: That bring a stage of keys or values; 0 where there is no attention.
        query_copies: That bring queries to latent rows; 0 where there are none.
        heads: Of such queries.
    """
    per_token = routing.choices
    made = Scratch(
        kernel=tiles.tile((STAGES, DEPTH, WGMMA_ROWS), dtype),
        x=tiles.tile((TILED_ROWS, row), dtype, copied_columns=WGMMA_ROWS),
        scores=plgpu.SMEM((per_token, WARPS), jnp.float32),
        weights=plgpu.SMEM((per_token, WARPS), jnp.float32),
        experts=plgpu.SMEM((per_token, WARPS), jnp.int32),
        full=plgpu.Barrier(num_barriers=STAGES),
        empty=plgpu.Barrier(num_barriers=STAGES),
        chosen=plgpu.Barrier(),
        attended_full=plgpu.Barrier(),
        rows_full=plgpu.Barrier(),
        hidden_full=plgpu.Barrier(),
        total=plgpu.SMEM((1, columns), dtype),
        keys=plgpu.SMEM((ranked_width(routing),), jnp.int32),
    )
    if not key_copies:
        return made
    keys_full = plgpu.Barrier(num_arrivals=key_copies, num_barriers=STAGES)
    if query_copies:
        p, queries_full = tiles.tile((heads, WGMMA_ROWS), dtype), plgpu.Barrier(num_arrivals=query_copies)
        return made._replace(p=p, keys_full=keys_full, queries_full=queries_full)
    return made._replace(
        q=tiles.tile((TILED_ROWS, DEPTH), dtype),
        p=tiles.tile((TILED_ROWS, WGMMA_ROWS), dtype),
        new=plgpu.SMEM((2, DEPTH), dtype),
        keys_full=keys_full,
    )


class Ring(NamedTuple):
    """Some stages, the first ones, that are used in turn, and others behind them that are used once.

    Attributes:
        stages: Of those in turn.
        before: So many have been used before, whose release nobody has waited for yet.
    """

    stages: int = STAGES
    before: Any = 0

    def copy(self, weights: Any, scratch: Scratch, done: Any) -> Any:
        """Asks for a stage's weights, once it is free; the stages asked for so far."""
        _copy(weights, scratch, lax.rem(done, self.stages), (done >= self.stages) | (done < self.before))
        return done + 1

    def copy_behind(self, weights: Any, scratch: Scratch, number: Any) -> None:
        """Likewise for one of the others."""
        _copy(weights, scratch, self.stages + number, self.stages + number < self.before)


def _copy(weights: Any, scratch: Scratch, stage: Any, is_used: Any) -> None:
    pl.when(is_used)(lambda: plgpu.barrier_wait(scratch.empty.at[stage]))
    plgpu.copy_gmem_to_smem(weights, scratch.kernel.at[stage], scratch.full.at[stage])


def store_row(out: Any, begin: Any, result: jax.Array, number: Any) -> None:
    """One of the rows of a block, from a flat place on."""
    if tiles.interpret_params() is not None:
        out[flat_places(out, begin, WGMMA_ROWS)] = lax.dynamic_index_in_dim(result, number, axis=1, keepdims=False)
        return
    layout = plgpu.Layout.WGMMA
    column, row = (plgpu.broadcasted_iota(jnp.int32, result.shape, axis, layout=layout) for axis in range(2))
    scatter(out, jnp.where(row == number, begin + column, -1), result, layout)


def of_row(result: jax.Array, number: Any) -> jax.Array:
    """One of the rows of a block, in all of them."""
    layout = plgpu.Layout.WGMMA
    row = plgpu.broadcasted_iota(jnp.int32, result.shape, 1, layout=layout)
    return lax.broadcast_in_dim(jnp.where(row == number, result, 0.0).sum(axis=1), result.shape, [0])


def store_zeros(out: Any, begin: Any) -> None:
    """As many zeros as a block has rows, from a flat place on."""
    if tiles.interpret_params() is not None:
        out[flat_places(out, begin, WGMMA_ROWS)] = jnp.zeros(WGMMA_ROWS, out.dtype)
        return
    layout = plgpu.Layout.WGMMA.reduce(1)
    scatter(out, plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=layout) + begin, 0, layout)
