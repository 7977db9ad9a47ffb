"""Queries of a head of keys, and the token's key and value, asked for at once, normed and turned."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jattn_kernels.mosaic.sm90.common.indexed import store_at
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS
from jattn_kernels.mosaic.sm90.common.token_heads import (
    DEPTH,
    HALF,
    LAYOUT,
    TokenHeads,
    of_all_heads,
    store_rows,
    summed,
    turned,
)
from jattn_kernels.mosaic.sm90.experts.one_token_stages import Scratch
from jattn_kernels.spec import AttentionSpec


def turn(heads: TokenHeads, spec: AttentionSpec, scratch: Scratch, head: Any, layer: Any, *, with_key: bool) -> None:
    """Eight query heads, from those of a head of keys on, into `scratch.q`; `commit_smem` is left to the caller.

    Args:
        head: Of keys.
        layer: Of the norms' scales; None if they have none.
        with_key: Whether its key and value of the token go into both rows of `scratch.new`; all is asked for at once.
    """
    norms, dtype = heads.norms, scratch.q.dtype

    def scale_of(name: str) -> list[jax.Array] | None:
        return None if layer is None else [of_all_heads(getattr(norms, name).at[layer, part]) for part in range(2)]

    def store_new(of_values: int, row: Any, halves: list[jax.Array]) -> None:
        for half, numbers in enumerate(halves):
            rows, column = (plgpu.broadcasted_iota(jnp.int32, numbers.shape, axis, layout=LAYOUT) for axis in range(2))
            place = of_values * DEPTH + half * HALF + column
            store_at(scratch.new, jnp.where(rows == row, place, -1), numbers, LAYOUT, along=1)

    owns = [spec.num_q_heads + of_values * spec.num_kv_heads + head for of_values in range(2)]
    firsts = [jnp.minimum(own, spec.num_q_heads + 2 * spec.num_kv_heads - WARPS) for own in owns]
    new = [summed(heads, 0, first, WARPS, dtype) for first in firsts] if with_key else []
    queries = summed(heads, 0, head * spec.group_size, TILED_ROWS, dtype)
    angles = [of_all_heads(ref.at[0]) for ref in (heads.cos, heads.sin)]
    q_scale, k_scale = scale_of("q_scale"), scale_of("k_scale") if with_key else None
    for half, numbers in enumerate(turned(queries, norms, angles, q_scale)):
        store_rows(scratch.q, half, numbers)
    if with_key:
        key, value = new
        key_row, value_row = (own - first for own, first in zip(owns, firsts, strict=True))
        store_new(0, key_row, turned(key, norms, angles, k_scale))
        store_new(1, value_row, value)
