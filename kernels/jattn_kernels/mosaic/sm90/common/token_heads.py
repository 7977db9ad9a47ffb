"""Queries of a head of keys, and a token's key and value, made of the product that is left: normed and turned.

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
from jattn_kernels.spec import AttentionSpec
from jattn_kernels.splits import Splits

DEPTH = 128  # of a head
_LANES = 32
_HALF = DEPTH // 2
_VECTOR = _HALF // _LANES
_CHUNK = 8  # numbers that swizzling moves together
_LAYOUT = halves_layout(WARPS, _HALF)


class TokenHeads(NamedTuple):
    """What heads are made of, in global memory.

    Attributes:
        qkv: Splits of a product: (splits, tokens, heads, 2, 64).
        cos, sin: (tokens, 64), float32.
        norms: With scales (layers, 2, 64), and the layer (1,); or None.
    """

    qkv: Any
    cos: Any
    sin: Any
    norms: HeadNorms | None

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
    scale = None if heads.norms is None else heads.norms.q_scale
    for half, numbers in enumerate(_turned(heads, token, first, rows, scale, target.dtype)):
        if tiled:
            _store_rows(target, half, numbers, row)
            continue
        own, column = (plgpu.broadcasted_iota(jnp.int32, numbers.shape, axis, layout=_LAYOUT) for axis in range(2))
        own = own if row is None else own + row
        store_at(target, own * DEPTH + half * _HALF + column, numbers, _LAYOUT, along=1)


def turn_key(heads: TokenHeads, spec: AttentionSpec, target: Any, token: Any, head: Any) -> None:
    """A head's key and value of a token into both rows of `target`, (2, 128); likewise."""
    num_heads, dtype = spec.num_q_heads + 2 * spec.num_kv_heads, target.dtype
    for of_values in range(2):
        own = spec.num_q_heads + of_values * spec.num_kv_heads + head
        first = jnp.minimum(own, num_heads - WARPS)
        if of_values:
            halves = _summed(heads, token, first, WARPS, dtype)
        else:
            scale = None if heads.norms is None else heads.norms.k_scale
            halves = _turned(heads, token, first, WARPS, scale, dtype)
        for half, numbers in enumerate(halves):
            row, column = (plgpu.broadcasted_iota(jnp.int32, numbers.shape, axis, layout=_LAYOUT) for axis in range(2))
            place = of_values * DEPTH + half * _HALF + column
            store_at(target, jnp.where(row == own - first, place, -1), numbers, _LAYOUT, along=1)


def _summed(heads: TokenHeads, token: Any, first: Any, rows: int, dtype: Any) -> list[jax.Array]:
    """Both halves of some heads, [rows, 64] each."""

    def load(split: int, part: int) -> jax.Array:
        own = heads.qkv.at[split, token, pl.ds(first, rows), part]
        return plgpu.load(own, layout=_LAYOUT, optimized=False).astype(jnp.float32)

    splits = [[load(i, part) for part in range(2)] for i in range(heads.qkv.shape[0])]
    return [functools.reduce(operator.add, halves).astype(dtype) for halves in zip(*splits, strict=True)]


def _turned(heads: TokenHeads, token: Any, first: Any, rows: int, scale: Any, dtype: Any) -> list[jax.Array]:
    """The same, normed and turned."""
    norms = heads.norms

    def of_all_heads(ref: Any) -> jax.Array:
        numbers = plgpu.load(ref, layout=_LAYOUT.reduce(0), optimized=False)
        return lax.broadcast_in_dim(numbers, (rows, _HALF), [1])

    halves = _summed(heads, token, first, rows, dtype)
    cos, sin = (of_all_heads(ref.at[token]) for ref in (heads.cos, heads.sin))
    if norms is not None:
        layer = norms.layer_index
        scales = None if scale is None else [of_all_heads(scale.at[layer[0], part]) for part in range(2)]
        halves = normed_halves(halves, norms, scales)
    one, other = (part.astype(jnp.float32) for part in halves)
    return [half.astype(dtype) for half in (one * cos - other * sin, other * cos + one * sin)]


def _store_rows(target: Any, half: int, values: jax.Array, first: Any) -> None:
    """target[rows from the first on, columns of the half] = values, in the form that wgmma reads."""
    if tiles.interpret_params() is not None:
        target[pl.ds(0 if first is None else first, values.shape[0]), pl.ds(half * _HALF, _HALF)] = values
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

    store_registers(target, values, _LAYOUT, places, *(() if first is None else (first,)))
