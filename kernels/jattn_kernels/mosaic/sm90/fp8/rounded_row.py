"""One row that a product's consumers round to fp8 together, added up and normed before or not."""

from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from jattn_kernels.call import NormCall
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.shared_row import Meeting, of_all, share_of_row, store_share
from jattn_kernels.mosaic.sm90.fp8.tile_sizes import BLOCK_DEPTH
from jattn_kernels.quantized import FP8, LARGEST, scale_of


def rounded_share(
    x: Any, row: Any, outs: tuple[Any, ...], norm: NormCall | None, place: Meeting, target: Any, number: Any
) -> Any:
    """A consumer's share of the row, in the first row of `target`, a tile of eight; the row's factor.

    Args:
        x, row, outs, norm, place, number: As of `share_of_row`.
    """
    normed, begin = share_of_row(x, row, outs, norm, place, number)
    numbers = normed.astype(jnp.float32)
    factor = scale_of(of_all(jnp.abs(numbers), jnp.maximum, place, 1, number))
    rounded = jnp.clip(numbers / factor, -LARGEST, LARGEST).astype(FP8)
    if tiles.interpret_params() is not None:
        target[0, pl.ds(begin, rounded.shape[0])] = rounded
    else:
        store_share(target, begin, rounded, BLOCK_DEPTH, _words)
    return factor


def _words(register: Any, column: Any) -> list[tuple[Any, Any]]:
    return [(column, utils.bitcast(register, ir.VectorType.get((2,), ir.IntegerType.get_signless(32))))]
