"""Tiles that wgmma cannot take as they were copied: numbers of 8 bits are widened first."""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp


class Readied(NamedTuple):
    """Where a tile of keys and one of values are made ready; None where they are read as they were copied."""

    keys: Any
    values: Any


def widen(source: Any, target: Any) -> None:
    """fp8 into float16, which holds every such number exactly."""
    narrow = plgpu.load(source, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
    target[...] = narrow.astype(jnp.float16)
    plgpu.commit_smem()
