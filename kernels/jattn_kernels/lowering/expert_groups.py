"""Tokens' rows grouped by expert: where each row stands, what the grouped products read, and how they are summed.

A row is one of a token's choices. The rows of an expert stand one after the other in slots, those of each expert from a
multiple of 8 on, so that what is stored in groups of 8 rows never meets another expert's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from jattn_kernels.mixture_operands import ExpertsOperands

GROUP = 8  # rows that a tile of wgmma's operands has
_BLOCK = 128  # tokens that are counted by one product
_MOST_BYTES = 96 * 2**20  # of what experts return, before it is summed
_PIECE_COLUMNS = 256


class ExpertGroups(NamedTuple):
    """The order of a mixture's rows; the same for both of an expert's products.

    Attributes:
        slots: Where a token's rows stand, a row a choice; -1 for that of no expert.
        sources: Which row of x stands in a slot; 0 in slots that no row has.
        work: Tiles: an expert, its first slot, its rows. Of what lies behind the last one nothing is to be done.
        num_tiles: How many there are.
    """

    slots: Int32[Array, "k T"]
    sources: Int32[Array, " S"]
    work: Int32[Array, "tiles 3"]
    num_tiles: Int32[Array, "1"]


class ProductOperands(NamedTuple):
    """What the kernel of a grouped product reads.

    Attributes:
        x: Rows.
        sources: Which row of x stands in a slot; None where they stand in their slots already.
        kernel: Weights of all layers.
        bias: Of all layers, or None.
        layer: Which of them.
        work, num_tiles: As in ExpertGroups.
    """

    x: Float[Array, "X K"]
    sources: Int[Array, " S"] | None
    kernel: Float[Array, "L E K C"]
    bias: Float[Array, "L E C"] | None
    layer: Int[Array, "1"]
    work: Int[Array, "tiles 3"]
    num_tiles: Int[Array, "1"]

    @classmethod
    def of_first(cls, operands: ExpertsOperands, groups: ExpertGroups, x: Float[Array, "X D"]) -> "ProductOperands":
        """Of rows wherever they are, and the gate's and the other half's weights."""
        return cls._of(operands, groups, x, groups.sources, operands.gate_up, operands.gate_up_bias)

    @classmethod
    def of_second(cls, operands: ExpertsOperands, groups: ExpertGroups, x: Float[Array, "S F"]) -> "ProductOperands":
        """Of hidden units in their slots, and the weights down."""
        return cls._of(operands, groups, x, None, operands.down, operands.down_bias)

    @classmethod
    def _of(cls, operands: ExpertsOperands, groups: ExpertGroups, x: Any, sources: Any, kernel: Any, bias: Any) -> Any:
        layer = operands.layer_index.reshape(1)
        return cls(x, sources, kernel, bias, layer, groups.work, groups.num_tiles)


def most_slots(num_tokens: int, per_token: int, num_experts: int) -> int:
    """Slots that any choice of so many experts finds room in."""
    rows = num_tokens * per_token
    wasted = (GROUP - 1) * min(rows, num_experts)
    return -(-(rows + wasted) // GROUP) * GROUP


def most_tiles(num_tokens: int, per_token: int, num_experts: int, block_rows: int) -> int:
    """Tiles of so many rows that any choice of experts can need."""
    rows = num_tokens * per_token
    return rows // block_rows + min(rows, num_experts)


def group_by_expert(
    chosen: Int32[Array, "T k"], num_experts: int, block_rows: int, *, rows_of_choices: bool = False
) -> ExpertGroups:
    """The groups of some choices, counted by products with a triangle of ones: no sort, and no order but the tokens'.

    Args:
        chosen: Experts; one outside 0 .. num_experts - 1 is none.
        rows_of_choices: Whether `sources` count a token's choices, t * k + i, not tokens.
    """
    num_tokens, per_token = chosen.shape
    experts = jnp.arange(num_experts)
    hits = jnp.any(chosen[:, :, None] == experts[None, None], axis=1).astype(jnp.float32)
    blocks = jnp.pad(hits, ((0, -num_tokens % _BLOCK), (0, 0))).reshape(-1, _BLOCK, num_experts)
    in_block = jnp.einsum("ij,nje->nie", jnp.tri(_BLOCK, k=-1, dtype=jnp.float32), blocks)
    of_block = jnp.sum(blocks, axis=1).astype(jnp.int32)
    earlier = in_block.astype(jnp.int32) + (jnp.cumsum(of_block, axis=0) - of_block)[:, None]
    counts = jnp.sum(of_block, axis=0)
    room = -(-counts // GROUP) * GROUP
    starts = jnp.cumsum(room) - room
    slot_of = earlier.reshape(-1, num_experts)[:num_tokens] + starts[None]
    is_expert = (chosen >= 0) & (chosen < num_experts)
    slots = jnp.where(is_expert, jnp.take_along_axis(slot_of, jnp.where(is_expert, chosen, 0), axis=1), -1)
    rows = jnp.arange(num_tokens * per_token, dtype=jnp.int32)
    num_slots = most_slots(num_tokens, per_token, num_experts)
    sources = jnp.zeros(num_slots, jnp.int32).at[jnp.where(slots < 0, num_slots, slots).reshape(-1)]
    sources = sources.set(rows if rows_of_choices else rows // per_token, mode="drop")
    work, num_tiles = _work(counts, starts, block_rows, most_tiles(num_tokens, per_token, num_experts, block_rows))
    return ExpertGroups(slots.T, sources, work, num_tiles)


def _work(counts: Int32[Array, " E"], starts: Int32[Array, " E"], block_rows: int, most: int):
    ends = jnp.cumsum(-(-counts // block_rows))
    number = jnp.arange(most)
    expert = jnp.minimum(jnp.sum(ends[None] <= number[:, None], axis=1), len(counts) - 1)
    done = (number - jnp.where(expert == 0, 0, ends[expert - 1])) * block_rows
    rows = jnp.clip(counts[expert] - done, 0, block_rows)
    return jnp.stack([expert, starts[expert] + done, rows], axis=1).astype(jnp.int32), ends[-1:].astype(jnp.int32)


def sum_in_pieces[Given](
    product: Callable[[Given, slice], Float[Array, "S columns"]],
    given: Given,
    slots: Int32[Array, "k T"],
    weights: Float32[Array, "k T"] | None,
    *,
    out_type: jax.ShapeDtypeStruct,
) -> Float[Array, "T D"]:
    """`weighted_sum` of what a product returns of what it is given, computed for some columns at a time.

    Args:
        out_type: Of the product's result, were all columns computed at once.
    """
    num_slots, width = out_type.shape
    most = max(_MOST_BYTES // (num_slots * out_type.dtype.itemsize) // _PIECE_COLUMNS, 1) * _PIECE_COLUMNS
    parts = []
    for begin in range(0, width, most):
        if parts:  # its memory is the last part's, which is summed by then
            given, parts[-1] = jax.lax.optimization_barrier((given, parts[-1]))
        returned = product(given, slice(begin, min(begin + most, width)))
        parts.append(weighted_sum(returned, slots, weights))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def weighted_sum(
    rows: Float[Array, "S D"], slots: Int32[Array, "k T"], weights: Float32[Array, "k T"] | None
) -> Float[Array, "T D"]:
    """The sum over a token's rows, each times its weight, in float32; in the rows' dtype at the end."""
    total = jnp.zeros((slots.shape[1], rows.shape[1]), jnp.float32)
    for choice, slot in enumerate(slots):
        row = rows[jnp.maximum(slot, 0)].astype(jnp.float32)
        if weights is not None:
            row *= weights[choice, :, None]
        total += jnp.where(slot[:, None] < 0, 0.0, row)
    return total.astype(rows.dtype)


def weighed_rows(x: Float[Array, "T D"], weights: Float32[Array, "k T"]) -> Float[Array, "T_k D"]:
    """A row for each of a token's choices, times its weight."""
    return (x.astype(jnp.float32)[:, None] * weights.T[:, :, None]).astype(x.dtype).reshape(-1, x.shape[1])


def silu_gate(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """silu(gate) * up."""
    return gate * jax.nn.sigmoid(gate) * up
