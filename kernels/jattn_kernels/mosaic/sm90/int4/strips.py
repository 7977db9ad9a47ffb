"""Strips of a work tile's columns that several consumers have a part in: one stores them, and is told by the others."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS

Activation = Callable[[jax.Array, jax.Array], jax.Array]


def others(strips: int, tellers: int, rows: int, dtype: Any) -> dict[str, Any]:
    """Scratch for what those who store no strip have of it, so many for each, and barriers for when it is there."""
    return {
        "others": plgpu.SMEM((strips, tellers, WGMMA_ROWS, rows), dtype),
        "others_full": plgpu.Barrier(num_arrivals=tellers, num_barriers=strips),
        "others_free": plgpu.Barrier(num_barriers=strips),
    }


def of_all_takers(
    total: jax.Array, scratch: Any, strip: Any, taker: Any, takers: int, store: Callable[[jax.Array], None]
) -> None:
    """Stores the sum of what a strip's takers have, which the first one is told by the others."""
    pl.when(taker > 0)(functools.partial(_tell, total, scratch, strip, taker - 1))

    @pl.when(taker == 0)
    def add():
        store(functools.reduce(jnp.add, _told(scratch, strip, takers - 1), total))


def of_both_halves(
    total: jax.Array, scratch: Any, strip: Any, half: Any, activation: Activation, store: Callable[[jax.Array], None]
) -> None:
    """Stores the activation of a strip's sums, a gate, and of those that it gates; both rounded before, as others do.

    Args:
        half: Which of them the consumer has: 0 is the gate.
    """
    rounded = total.astype(scratch.others.dtype)
    pl.when(half == 1)(functools.partial(_tell, rounded, scratch, strip, 0))

    @pl.when(half == 0)
    def gate():
        (up,) = _told(scratch, strip, 1)
        store(activation(rounded.astype(jnp.float32), up.astype(jnp.float32)))


def _tell(sums: jax.Array, scratch: Any, strip: Any, teller: Any) -> None:
    scratch.others[strip, teller] = sums
    plgpu.barrier_arrive(scratch.others_full.at[strip])
    plgpu.barrier_wait(scratch.others_free.at[strip])


def _told(scratch: Any, strip: Any, tellers: int) -> list[jax.Array]:
    plgpu.barrier_wait(scratch.others_full.at[strip])
    refs = [scratch.others.at[strip, teller] for teller in range(tellers)]
    sums = [plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False) for ref in refs]
    plgpu.barrier_arrive(scratch.others_free.at[strip])
    return sums
