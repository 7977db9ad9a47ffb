"""One row that a product's consumers round to fp8 together, added up and normed before or not."""

from typing import Any

import jax.numpy as jnp

from jattn_kernels.call import NormCall
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
    store_share(target, begin, rounded, BLOCK_DEPTH)
    return factor
