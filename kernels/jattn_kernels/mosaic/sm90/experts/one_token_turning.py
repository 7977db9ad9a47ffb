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


def turn_queries(operands: Any, scratch: Scratch, first: Any) -> None:
    """Eight query heads, from one on, into `scratch.q`; `commit_smem` is left to the caller."""
    halves = _turned(operands, first, TILED_ROWS, None if operands.norms is None else operands.norms.q_scale)
    for half, numbers in enumerate(halves):
        _store_rows(scratch.q, half, numbers)


def turn_key(operands: Any, spec: AttentionSpec, scratch: Scratch, head: Any) -> None:
    """A head's key and value of the token into both rows of `scratch.new`; likewise."""
    num_heads = spec.num_q_heads + 2 * spec.num_kv_heads
    for of_values in range(2):
        own = spec.num_q_heads + of_values * spec.num_kv_heads + head
        first = jnp.minimum(own, num_heads - WARPS)
        if of_values:
            halves = _summed(operands, first, WARPS)
        else:
            halves = _turned(operands, first, WARPS, None if operands.norms is None else operands.norms.k_scale)
        for half, numbers in enumerate(halves):
            row, column = (plgpu.broadcasted_iota(jnp.int32, numbers.shape, axis, layout=_LAYOUT) for axis in range(2))
            place = of_values * DEPTH + half * _HALF + column
            store_at(scratch.new, jnp.where(row == own - first, place, -1), numbers, _LAYOUT, along=1)


def _summed(operands: Any, first: Any, rows: int) -> list[jax.Array]:
    """Both halves of some heads, [rows, 64] each."""

    def load(split: int, part: int) -> jax.Array:
        return plgpu.load(operands.qkv.at[split, 0, pl.ds(first, rows), part], layout=_LAYOUT, optimized=False)

    splits = [[load(i, part) for part in range(2)] for i in range(operands.qkv.shape[0])]
    dtype = operands.k_pages.dtype
    return [functools.reduce(operator.add, halves).astype(dtype) for halves in zip(*splits, strict=True)]


def _turned(operands: Any, first: Any, rows: int, scale: Any) -> list[jax.Array]:
    """The same, normed and turned."""
    norms = operands.norms

    def of_all_heads(ref: Any) -> jax.Array:
        numbers = plgpu.load(ref, layout=_LAYOUT.reduce(0), optimized=False)
        return lax.broadcast_in_dim(numbers, (rows, _HALF), [1])

    halves = _summed(operands, first, rows)
    dtype = halves[0].dtype
    cos, sin = (of_all_heads(ref.at[0]) for ref in (operands.cos, operands.sin))
    if norms is not None:
        scales = None if scale is None else [of_all_heads(scale.at[norms.layer_index[0], part]) for part in range(2)]
        halves = normed_halves(halves, norms, scales)
    one, other = (part.astype(jnp.float32) for part in halves)
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
