"""What the sums of one token's mixture in one kernel make: hidden units, and what experts return."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.indexed import gather, scatter
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.mosaic.sm90.experts.one_token_units import HALVES, OneTokenUnits

_LAYOUT = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def store_hidden(
    hidden: Any,
    bias: Any,
    factor: Any,
    activation: Callable[[Any, Any], Any],
    units: OneTokenUnits,
    expert: Any,
    choice: Any,
    block: Any,
    sums: Any,
) -> None:
    """Each thread has one of the hidden units, of which there are fewer than threads: some twice.

    Args:
        factor: Of the token.
        sums: (consumers, 64, rows and some left free); there is one row here, and one an expert in `store_returned`.
    """
    side = units.side(False)
    column, own = _columns(side)
    halves = []
    for half in range(HALVES):
        number = _sum_of(sums, column + half * side, 0) * factor
        if bias is not None:
            at = (expert * HALVES + half) * units.hidden + block * side + column
            number += gather(bias, at, _LAYOUT).astype(jnp.float32)
        halves.append(number)
    result = activation(*halves).astype(hidden.dtype)
    _store(hidden, choice * units.hidden + block * side, result, column, own, side)


def store_returned(
    parts: Any,
    bias: Any,
    factor: Any,
    weight: Any,
    units: OneTokenUnits,
    expert: Any,
    choice: Any,
    block: Any,
    half: Any,
    sums: Any,
) -> None:
    """64 columns of what an expert returns, times its weight.

    Args:
        factor: Of the expert's hidden units.
        sums: As of `store_hidden`.
    """
    side = units.side(True)
    column, own = _columns(side)
    result = _sum_of(sums, column, choice) * factor
    if bias is not None:
        at = expert * units.hidden + block * side + column
        result += gather(bias, at, _LAYOUT).astype(jnp.float32) * jnp.where(half == 0, 1.0, 0.0)
    result *= weight
    begin = (half * units.per_token + choice) * units.hidden + block * side
    _store(parts, begin, result, column, own, side)


def _columns(side: int) -> tuple[jax.Array, jax.Array]:
    """Each thread's column, and whether it is the first that has it."""
    column = plgpu.broadcasted_iota(jnp.int32, (128,), 0, layout=_LAYOUT)
    return lax.rem(column, side), column < side


def _sum_of(sums: Any, column: Any, row: Any) -> jax.Array:
    """What consumers add up to, of some columns of a unit's 64."""
    consumers, _, width = sums.shape
    places = (column * width + row + consumer * WGMMA_ROWS * width for consumer in range(consumers))
    return functools.reduce(jnp.add, [gather(sums, each, _LAYOUT) for each in places])


def _store(out: Any, begin: Any, result: jax.Array, column: Any, own: Any, side: int) -> None:
    """A unit's numbers, one after the other from there on."""
    if tiles.interpret_params() is not None:
        out[pl.ds(begin, side)] = result[:side]
        return
    scatter(out, jnp.where(own, begin + column, -1), result, _LAYOUT)
