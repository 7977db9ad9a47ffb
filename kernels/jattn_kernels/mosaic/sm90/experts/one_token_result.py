"""What the sums of one token's mixture in mxfp4 make: hidden units, and what experts return."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.arrivals import NEVER_ZERO, never_zero
from jattn_kernels.mosaic.sm90.common.indexed import gather, scatter
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_stages import flat_places
from jattn_kernels.mosaic.sm90.experts.one_token_units import HALVES, OneTokenUnits

_LAYOUT = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


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
            number += gather(bias, at, _LAYOUT).astype(jnp.float32)
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
        result += gather(bias, at, _LAYOUT).astype(jnp.float32) * jnp.where(half == 0, 1.0, 0.0)
    return result * weight


def no_columns() -> jax.Array:
    """Zeros of that layout."""
    return plgpu.layout_cast(jnp.zeros((128,), jnp.float32), _LAYOUT)


def put_columns(out: Any, begin: Any, numbers: jax.Array | None, side: int, *, told: bool = False) -> None:
    """The first `side` of such numbers, from a flat place on.

    Args:
        numbers: None for zeros.
        told: Whether they are stored for who polls (`arrivals`).
    """
    if tiles.interpret_params() is not None:
        out[flat_places(out, begin, side)] = jnp.zeros(side, out.dtype) if numbers is None else numbers[:side]
        return
    column = plgpu.broadcasted_iota(jnp.int32, (128,), 0, layout=_LAYOUT)
    values = (NEVER_ZERO if told else 0) if numbers is None else never_zero(numbers) if told else numbers
    scatter(out, jnp.where(column < side, begin + column, -1), values, _LAYOUT)


def _columns(side: int) -> jax.Array:
    """Each thread's column."""
    return lax.rem(plgpu.broadcasted_iota(jnp.int32, (128,), 0, layout=_LAYOUT), side)


def _sum_of(sums: Any, column: Any) -> jax.Array:
    """What consumers add up to, of some columns of a unit's 64."""
    consumers, _, width = sums.shape
    places = (column * width + consumer * WGMMA_ROWS * width for consumer in range(consumers))
    return functools.reduce(jnp.add, [gather(sums, each, _LAYOUT) for each in places])
