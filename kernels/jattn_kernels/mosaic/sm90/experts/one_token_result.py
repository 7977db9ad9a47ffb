"""What the sums of one token's mixture in mxfp4 make: hidden units, and what experts return."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common.columns import LAYOUT
from jattn_kernels.mosaic.sm90.common.indexed import gather
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_units import HALVES, OneTokenUnits


def hidden_units(
    bias: Any,
    factor: Any,
    activation: Callable[[Any, Any], Any],
    units: OneTokenUnits,
    expert: Any,
    block: Any,
    sums: Any,
) -> jax.Array:
    """Each thread has one of the hidden units, of which there are fewer than threads: some twice.

    Args:
        factor: Of the token.
        sums: (consumers, 64, any rows), the same in all rows.
    """
    side = units.side(False)
    column = _columns(side)
    halves = []
    for half in range(HALVES):
        number = _sum_of(sums, column + half * side) * factor
        if bias is not None:
            at = (expert * HALVES + half) * units.hidden + block * side + column
            number += gather(bias, at, LAYOUT).astype(jnp.float32)
        halves.append(number)
    return activation(*halves)


def returned_columns(
    bias: Any, factor: Any, weight: Any, units: OneTokenUnits, expert: Any, block: Any, half: Any, sums: Any
) -> jax.Array:
    """64 columns of what an expert returns, times its weight; as of `hidden_units`, some twice.

    Args:
        factor: Of the expert's hidden units.
        half: Of the depth: a bias is in the first one's.
    """
    side = units.side(True)
    column = _columns(side)
    result = _sum_of(sums, column) * factor
    if bias is not None:
        at = expert * units.hidden + block * side + column
        result += gather(bias, at, LAYOUT).astype(jnp.float32) * jnp.where(half == 0, 1.0, 0.0)
    return result * weight


def _columns(side: int) -> jax.Array:
    """Each thread's column."""
    return lax.rem(plgpu.broadcasted_iota(jnp.int32, (128,), 0, layout=LAYOUT), side)


def _sum_of(sums: Any, column: Any) -> jax.Array:
    """What consumers add up to, of some columns of a unit's 64."""
    consumers, _, width = sums.shape
    places = (column * width + consumer * WGMMA_ROWS * width for consumer in range(consumers))
    return functools.reduce(jnp.add, [gather(sums, each, LAYOUT) for each in places])
