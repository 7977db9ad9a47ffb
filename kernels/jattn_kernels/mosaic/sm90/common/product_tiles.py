"""What products with weights of few bits share: their work tiles, and the end of their copies."""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


class ProductTile(NamedTuple):
    """Blocks of rows and of columns, and the steps of a share of the depth."""

    row_block: Any
    column_block: Any
    split: Any
    first: Any
    steps: Any


def wait_for_last(empty: Any, steps: Any, stages: int) -> None:
    """Waits until what was copied in the last of so many steps is no longer needed."""

    @pl.loop(jnp.maximum(steps, stages), steps + stages)
    def wait(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, stages)])
