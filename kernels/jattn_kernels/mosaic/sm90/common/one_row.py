"""The norm of one row as a product's operand, of what is added up first: a warpgroup has the row in registers."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.row_pieces import THREADS, VECTOR, Piece, pieces
from jattn_kernels.mosaic.sm90.common.tile_stores import COLUMNS, constant, divided, store_registers
from jattn_kernels.mosaic.sm90.common.tiles import TILED_ROWS


def added_up(piece: Piece, parts: Any, row: Any) -> jax.Array:
    """A piece of a row of what splits add up to."""
    loaded = (piece.load(parts.at[i, row]).astype(jnp.float32) for i in range(parts.shape[0]))
    return functools.reduce(operator.add, loaded)


def rounded_sum(numbers: jax.Array, addition: jax.Array, *, dtype: Any) -> jax.Array:
    """The sum of two numbers of this dtype, the second of which is not rounded to it yet; all in float32."""
    return (numbers + addition.astype(dtype).astype(jnp.float32)).astype(dtype).astype(jnp.float32)


def norm_of_sum(
    x: Any,
    scale: Any,
    additions: list[Any],
    target: Any,
    outs: tuple[Any, ...],
    *,
    eps: float,
    offset: float,
    last: Callable[[Piece], jax.Array] | None = None,
    kept: Any = None,
) -> list[jax.Array]:
    """The first row of `target`: the norm of x's first row and what is added to it; wgmma then sees it.

    Args:
        x: (1, columns), in global memory; the same of `outs`.
        scale: (columns,), in global memory.
        additions: Parts of splits, in global memory.
        target: (8, columns), tiled; its other rows stay as they are.
        outs: Where the first block stores the sum, and then its norm; as far as they are asked for.
        last: A piece of one more addition, which may have to be waited for: all else has been read by then.
        kept: (1, columns), where each block keeps the sum for itself.

    Returns:
        The same, in pieces.
    """
    dtype, columns = x.dtype, x.shape[1]
    of_row = pieces(columns)
    loaded = [[piece.load(ref).astype(jnp.float32) for ref in (x.at[0], scale)] for piece in of_row]
    of_parts = [[added_up(piece, parts, 0) for parts in additions] for piece in of_row]
    if last is not None:
        for piece, of_piece in zip(of_row, of_parts, strict=True):
            of_piece.append(last(piece))
    add = functools.partial(rounded_sum, dtype=dtype)
    sums = [functools.reduce(add, parts, numbers) for parts, (numbers, _) in zip(of_parts, loaded, strict=True)]
    squares = [piece.once(numbers * numbers).sum() for piece, numbers in zip(of_row, sums, strict=True)]
    inverse = lax.rsqrt(functools.reduce(operator.add, squares) / columns + eps)
    normed = [
        (numbers * inverse * (factor + offset)).astype(dtype) for numbers, (_, factor) in zip(sums, loaded, strict=True)
    ]
    for piece, numbers, total in zip(of_row, normed, sums, strict=True):
        store_in_tile(target, numbers, piece)
        if kept is not None:
            piece.of(kept.at[0])[...] = total.astype(dtype)
    plgpu.commit_smem()

    @pl.when(lax.axis_index("block") == 0)
    def keep():
        for out, of_pieces in zip(outs, (sums, normed), strict=False):
            for piece, numbers in zip(of_row, of_pieces, strict=True):
                piece.of(out.at[0])[...] = numbers.astype(dtype)

    return normed


def store_in_tile(target: Any, values: jax.Array, piece: Piece) -> None:
    """target[0, columns of the piece] = values: no number of a tile's first row is moved by swizzling."""
    if tiles.interpret_params() is not None:
        target[0, pl.ds(piece.begin, piece.size)] = values
        return

    def places(thread: Any) -> Any:
        def place(i: int) -> Any:
            vector = arith.addi(thread, constant(piece.begin // VECTOR + i * THREADS))
            tile, in_row = divided(vector, COLUMNS // VECTOR)
            return arith.addi(arith.muli(tile, constant(TILED_ROWS * COLUMNS)), arith.muli(in_row, constant(VECTOR)))

        return place

    store_registers(target, values, piece.layout, places)
