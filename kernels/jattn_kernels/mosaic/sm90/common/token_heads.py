"""Heads of a token made of the product that is left, normed and turned; queries into a tile.

The formulas are those of `rotate_and_write`, in its order: a head lies in a warp, as two halves.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from jattn_kernels.head_norms import HeadNorms
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.indexed import store_at
from jattn_kernels.mosaic.sm90.common.tile_stores import COLUMNS, constant, divided, store_registers
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS, WARPS
from jattn_kernels.mosaic.sm90.rotate_and_write import halves_layout, normed_halves
from jattn_kernels.operands import RotaryOperands
from jattn_kernels.splits import Splits

DEPTH = 128  # of a head
_LANES = 32
HALF = DEPTH // 2
_VECTOR = HALF // _LANES
_CHUNK = 8  # numbers that swizzling moves together
LAYOUT = halves_layout(WARPS, HALF)


class TokenHeads(NamedTuple):
    """What heads are made of, in global memory.

    Attributes:
        qkv: Splits of a product: (splits, tokens, heads, 2, 64).
        cos, sin: (tokens, 64), float32.
        norms: HeadNorms with scales (layers, 2, 64), and the layer (1,); or None.
    """

    qkv: Any
    cos: Any
    sin: Any
    norms: Any

    @classmethod
    def of(cls, rotary: RotaryOperands) -> "TokenHeads":
        """Those of splits."""
        parts, norms = rotary.qkv, rotary.norms
        assert isinstance(parts, Splits)
        return cls(_in_halves(parts.parts), rotary.cos, rotary.sin, None if norms is None else _norms_in_halves(norms))


def _in_halves(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)


def _norms_in_halves(norms: HeadNorms) -> HeadNorms:
    scales = norms.scales()
    if scales is None:
        return norms
    q_scale, k_scale, number = scales
    stacks: dict[str, Any] = {"q_scale": _in_halves(q_scale), "k_scale": _in_halves(k_scale)}
    return HeadNorms(**stacks, layer_index=number.reshape(1), eps=norms.eps, offset=norms.offset)


def turn_queries(
    heads: TokenHeads,
    target: Any,
    token: Any,
    first: Any,
    *,
    rows: int = TILED_ROWS,
    row: Any = None,
    tiled: bool = True,
) -> None:
    """Query heads of a token, from one on, into `target`, (8, 128); `commit_smem` is left to the caller.

    Args:
        rows: Heads, 4 or 8.
        row: Of `target`, where the first of four goes.
        tiled: Whether that is a tile as wgmma reads it.
    """
    norms = heads.norms
    halves = summed(heads, token, first, rows, target.dtype)
    angles = [of_all_heads(ref.at[token]) for ref in (heads.cos, heads.sin)]
    scale = None
    if norms is not None and norms.q_scale is not None:
        scale = [of_all_heads(norms.q_scale.at[norms.layer_index[0], part]) for part in range(2)]
    for half, numbers in enumerate(turned(halves, norms, angles, scale)):
        if tiled:
            store_rows(target, half, numbers, row)
            continue
        own, column = (plgpu.broadcasted_iota(jnp.int32, numbers.shape, axis, layout=LAYOUT) for axis in range(2))
        own = own if row is None else own + row
        store_at(target, own * DEPTH + half * HALF + column, numbers, LAYOUT, along=1)


def of_all_heads(ref: Any) -> jax.Array:
    """Numbers of a half's columns, [64], that are every head's."""
    return plgpu.load(ref, layout=LAYOUT.reduce(0), optimized=False)


def summed(heads: TokenHeads, token: Any, first: Any, rows: int, dtype: Any) -> list[jax.Array]:
    """Both halves of some heads, [rows, 64] each."""

    def load(split: int, part: int) -> jax.Array:
        own = heads.qkv.at[split, token, pl.ds(first, rows), part]
        return plgpu.load(own, layout=LAYOUT, optimized=False).astype(jnp.float32)

    splits = [[load(i, part) for part in range(2)] for i in range(heads.qkv.shape[0])]
    return [functools.reduce(operator.add, halves).astype(dtype) for halves in zip(*splits, strict=True)]


def turned(halves: list[jax.Array], norms: Any, angles: list[jax.Array], scale: list[jax.Array] | None) -> list[Any]:
    """The same, normed and turned.

    Args:
        angles: Cosines and sines of a half's columns.
        scale: Of the norm, both halves; None if it has none.
    """
    shape, dtype = halves[0].shape, halves[0].dtype

    def spread(of_columns: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(of_columns, shape, [1])

    if norms is not None:
        halves = normed_halves(halves, norms, None if scale is None else list(map(spread, scale)))
    one, other = (part.astype(jnp.float32) for part in halves)
    cos, sin = map(spread, angles)
    return [half.astype(dtype) for half in (one * cos - other * sin, other * cos + one * sin)]


def store_rows(target: Any, half: int, values: jax.Array, first: Any = None) -> None:
    """target[rows from the first on, columns of the half] = values, in the form that wgmma reads."""
    if tiles.interpret_params() is not None:
        target[pl.ds(0 if first is None else first, values.shape[0]), pl.ds(half * HALF, HALF)] = values
        return

    def places(thread: Any, first: Any = None) -> Any:
        warp, lane = divided(thread, _LANES)
        chunk, in_chunk = divided(arith.muli(lane, constant(_VECTOR)), _CHUNK)

        def place(i: int) -> Any:
            row = arith.addi(warp, constant(i * WARPS))
            row = row if first is None else arith.addi(row, first)
            moved = arith.addi(arith.muli(arith.xori(chunk, row), constant(_CHUNK)), in_chunk)
            number = arith.addi(arith.muli(row, constant(COLUMNS)), moved)
            return arith.addi(number, constant(half * TILED_ROWS * COLUMNS))

        return place

    store_registers(target, values, LAYOUT, places, *(() if first is None else (first,)))
