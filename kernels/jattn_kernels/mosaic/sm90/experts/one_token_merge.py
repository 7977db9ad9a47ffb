"""The merge of attention's splits into the row of a product, by each block for the heads of its share of the depth.

A warp has a head at a time, so that a thread reads four neighbouring columns of each split.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.arrivals import arrived
from jattn_kernels.mosaic.sm90.common.tile_stores import COLUMNS, constant, divided, store_registers
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS
from jattn_kernels.mosaic.sm90.experts.one_token_attention import AT_ONCE, AttentionPhase, SplitRoom
from jattn_kernels.mosaic.sm90.experts.one_token_stages import DEPTH

_LANES = 32
_VECTOR = DEPTH // _LANES
BY_HEADS = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, DEPTH), (_VECTOR,))), (-3,), (-2,), -1)
_OF_HEADS = BY_HEADS.reduce(1)


def merged_width(heads: int) -> int:
    """Columns of a row that so many heads are put into."""
    return pl.cdiv(heads, WARPS) * WARPS * DEPTH


def merge_into(target: Any, phase: AttentionPhase, operands: Any, room: SplitRoom, first_head: Any, heads: int) -> None:
    """The first row of `target`: what so many heads attend, from one on; wgmma then sees it.

    Args:
        target: (8, `merged_width`), tiled; its other rows stay as they are.
        heads: Past the last head that one is taken again.
    """
    rows = merged_width(heads) // DEPTH
    busy, shape = phase.share(operands.seq_lens[0], 0).busy, (rows, DEPTH)

    def head(layout: Any, shape: tuple[int, ...]) -> jax.Array:
        number = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + first_head
        return jnp.minimum(number, phase.spec.num_q_heads - 1)

    of_outs = head(BY_HEADS, shape) * DEPTH + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=BY_HEADS)
    of_sums = head(_OF_HEADS, (rows,)) + phase.depth

    def spread(of_heads: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(of_heads, shape, [0])

    def merge_some(step: Any, carry: Any) -> Any:
        acc, m_i, l_i = carry
        splits = [step * AT_ONCE + i for i in range(AT_ONCE)]
        begins = [room.of(jnp.minimum(split, busy - 1), phase.record) for split in splits]
        places = [of_outs + begin for begin in begins] + [of_sums + begin for begin in begins]
        numbers = arrived(room.ref, places, [BY_HEADS] * AT_ONCE + [_OF_HEADS] * AT_ONCE)
        outs = numbers[:AT_ONCE]
        sums = [
            each + jnp.where(split < busy, 0.0, -jnp.inf) for split, each in zip(splits, numbers[AT_ONCE:], strict=True)
        ]
        m_new = functools.reduce(jnp.maximum, sums, m_i)
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        alpha = jnp.exp2(m_i - shift)
        acc, l_i = acc * spread(alpha), l_i * alpha
        for out, each in zip(outs, sums, strict=True):
            weight = jnp.exp2(each - shift)
            acc, l_i = acc + out * spread(weight), l_i + weight
        return acc, m_new, l_i

    start = (
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), BY_HEADS),
        plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), _OF_HEADS),
        plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), _OF_HEADS),
    )
    acc, _, l_i = lax.fori_loop(0, lax.div(busy + AT_ONCE - 1, AT_ONCE), merge_some, start)
    store_heads(target, (acc / spread(jnp.where(l_i == 0, 1.0, l_i))).astype(target.dtype))
    plgpu.commit_smem()


def store_heads(target: Any, values: jax.Array) -> None:
    """target[0] = values, head after head: no number of a tile's first row is moved by swizzling."""
    if tiles.interpret_params() is not None:
        for head in range(values.shape[0]):
            target[0, pl.ds(head * DEPTH, DEPTH)] = values[head]
        return

    def places(thread: Any) -> Any:
        warp, lane = divided(thread, _LANES)

        def place(i: int) -> Any:
            head = arith.addi(warp, constant(i * WARPS))
            column = arith.addi(arith.muli(head, constant(DEPTH)), arith.muli(lane, constant(_VECTOR)))
            tile, in_row = divided(column, COLUMNS)
            return arith.addi(arith.muli(tile, constant(TILED_ROWS * COLUMNS)), in_row)

        return place

    store_registers(target, values, BY_HEADS, places)
