"""Few columns of a row, a thread each: stored from a flat place on, for who polls too."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.arrivals import NEVER_ZERO, never_zero
from jattn_kernels.mosaic.sm90.common.indexed import scatter

LAYOUT = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def no_columns() -> jax.Array:
    """Zeros of that layout."""
    return plgpu.layout_cast(jnp.zeros((128,), jnp.float32), LAYOUT)


def put_columns(out: Any, begin: Any, numbers: jax.Array | None, side: int, *, told: bool = False) -> None:
    """The first `side` of such numbers, from a flat place on.

    Args:
        numbers: None for zeros.
        told: Whether they are stored for who polls (`arrivals`).
    """
    if tiles.interpret_params() is not None:
        out[flat_places(out, begin, side)] = jnp.zeros(side, out.dtype) if numbers is None else numbers[:side]
        return
    column = plgpu.broadcasted_iota(jnp.int32, (128,), 0, layout=LAYOUT)
    values = (NEVER_ZERO if told else 0) if numbers is None else never_zero(numbers) if told else numbers
    scatter(out, jnp.where(column < side, begin + column, -1), values, LAYOUT)


def flat_places(out: Any, begin: Any, size: int) -> tuple[Any, ...]:
    """Those of so many numbers, from a flat place on."""
    places: list[Any] = []
    for length in reversed(out.shape):
        places, begin = [lax.rem(begin, length), *places], lax.div(begin, length)
    return (*places[:-1], pl.ds(places[-1], size))
