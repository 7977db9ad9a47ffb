"""Queries of a head of keys, and the token's key and value, made of the product that is left: normed and turned.

The formulas are those of `rotate_and_write`, in its order: a head lies in a warp, as two halves.
"""

import functools
import operator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.indexed import store_at
from jattn_kernels.mosaic.sm90.common.tile_stores import COLUMNS, constant, divided, store_registers
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS
from jattn_kernels.mosaic.sm90.experts.one_token_stages import DEPTH, Scratch
from jattn_kernels.mosaic.sm90.rotate_and_write import halves_layout, normed_halves
from jattn_kernels.spec import AttentionSpec

_LANES = 32
_HALF = DEPTH // 2
_VECTOR = _HALF // _LANES
_CHUNK = 8  # numbers that swizzling moves together
_LAYOUT = halves_layout(WARPS, _HALF)


def turn(operands: Any, spec: AttentionSpec, scratch: Scratch, head: Any, layer: Any, *, with_key: bool) -> None:
    """Eight query heads, from those of a head of keys on, into `scratch.q`; `commit_smem` is left to the caller.

    Args:
        head: Of keys.
        layer: Of the norms' scales; None if they have none.
        with_key: Whether its key and value of the token go into both rows of `scratch.new`; all is asked for at once.
    """
    norms = operands.norms

    def of_all_heads(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=_LAYOUT.reduce(0), optimized=False)

    def scale_of(name: str) -> list[jax.Array] | None:
        return None if layer is None else [of_all_heads(getattr(norms, name).at[layer, part]) for part in range(2)]

    def store_new(of_values: int, row: Any, halves: list[jax.Array]) -> None:
        for half, numbers in enumerate(halves):
            rows, column = (plgpu.broadcasted_iota(jnp.int32, numbers.shape, axis, layout=_LAYOUT) for axis in range(2))
            place = of_values * DEPTH + half * _HALF + column
            store_at(scratch.new, jnp.where(rows == row, place, -1), numbers, _LAYOUT, along=1)

    owns = [spec.num_q_heads + of_values * spec.num_kv_heads + head for of_values in range(2)]
    firsts = [jnp.minimum(own, spec.num_q_heads + 2 * spec.num_kv_heads - WARPS) for own in owns]
    new = [_summed(operands, first, WARPS) for first in firsts] if with_key else []
    queries = _summed(operands, head * spec.group_size, TILED_ROWS)
    angles = [of_all_heads(ref.at[0]) for ref in (operands.cos, operands.sin)]
    q_scale, k_scale = scale_of("q_scale"), scale_of("k_scale") if with_key else None
    for half, numbers in enumerate(_turned(queries, norms, angles, q_scale)):
        _store_rows(scratch.q, half, numbers)
    if with_key:
        key, value = new
        key_row, value_row = (own - first for own, first in zip(owns, firsts, strict=True))
        store_new(0, key_row, _turned(key, norms, angles, k_scale))
        store_new(1, value_row, value)


def _summed(operands: Any, first: Any, rows: int) -> list[jax.Array]:
    """Both halves of some heads, [rows, 64] each."""

    def load(split: int, part: int) -> jax.Array:
        return plgpu.load(operands.qkv.at[split, 0, pl.ds(first, rows), part], layout=_LAYOUT, optimized=False)

    splits = [[load(i, part) for part in range(2)] for i in range(operands.qkv.shape[0])]
    dtype = operands.k_pages.dtype
    return [functools.reduce(operator.add, halves).astype(dtype) for halves in zip(*splits, strict=True)]


def _turned(halves: list[jax.Array], norms: Any, angles: list[jax.Array], scale: list[jax.Array] | None) -> list[Any]:
    """Both halves of some heads, normed and turned."""
    shape, dtype = halves[0].shape, halves[0].dtype

    def spread(of_columns: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(of_columns, shape, [1])

    if norms is not None:
        halves = normed_halves(halves, norms, None if scale is None else list(map(spread, scale)))
    one, other = (part.astype(jnp.float32) for part in halves)
    cos, sin = map(spread, angles)
    return [half.astype(dtype) for half in (one * cos - other * sin, other * cos + one * sin)]


def _store_rows(target: Any, half: int, values: jax.Array) -> None:
    """target[:, columns of the half] = values, in the form that wgmma reads."""
    if tiles.interpret_params() is not None:
        target[:, pl.ds(half * _HALF, _HALF)] = values
        return

    def places(thread: Any) -> Any:
        warp, lane = divided(thread, _LANES)
        chunk, in_chunk = divided(arith.muli(lane, constant(_VECTOR)), _CHUNK)

        def place(i: int) -> Any:
            row = arith.addi(warp, constant(i * WARPS))
            moved = arith.addi(arith.muli(arith.xori(chunk, row), constant(_CHUNK)), in_chunk)
            number = arith.addi(arith.muli(row, constant(COLUMNS)), moved)
            return arith.addi(number, constant(half * TILED_ROWS * COLUMNS))

        return place

    store_registers(target, values, _LAYOUT, places)
