"""Tiles that wgmma cannot take as they were copied: 8-bit values are dequantised, and rows are rotated.

A rotation by a position is one by the tile's first position and one by what is left. So keys are rotated only by their
number in the tile, from one small table for all tiles, and the few queries are rotated back by the tile's first key.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jattn_kernels.lowering.rope import angles
from jattn_kernels.mosaic.sm90.common.tiles import WGMMA_ROWS
from jattn_kernels.spec import AttentionSpec


class Converted(NamedTuple):
    """Where tiles are converted; None where they are read as they were copied."""

    queries: Any
    keys: Any
    values: Any


class Rotation(NamedTuple):
    """Cosine and sine of the angle of each pair, of one position or of each of some."""

    cos: Any
    sin: Any


def rotation_of(position: Int[Array, " n"], spec: AttentionSpec, dtype: Any, shrink: float = 1.0) -> Rotation:
    """The angles of each of some positions, [n, pairs], made in XLA.

    Args:
        shrink: What is rotated is divided by this too, a power of two.
    """
    assert spec.rope_theta is not None
    angle = angles(position, spec.head_dim, theta=spec.rope_theta, scale=spec.rope_scale)
    return Rotation(*((part / shrink).astype(dtype) for part in (jnp.cos(angle), jnp.sin(angle))))


def dequantise(source: Any, target: Any) -> None:
    """fp8 into float16, which holds every such number exactly."""
    narrow = plgpu.load(source, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
    target[...] = narrow.astype(jnp.float16)
    plgpu.commit_smem()


def dequantise_tile(source: Any, target: Any) -> None:
    """A tile of fp8 into one of float16, some rows and columns at a time: registers are few."""
    block_kv, width = target.shape
    columns = 64 if width % 128 else 128
    for row in range(0, block_kv, WGMMA_ROWS):
        for column in range(0, width, columns):
            part = pl.ds(row, WGMMA_ROWS), pl.ds(column, columns)
            dequantise(source.at[part], target.at[part])


def rotate_keys(source: Any, target: Any, rotation: Rotation) -> None:
    """Pairs (i, i + H / 2) of each key rotated on by its own angles."""
    half = source.shape[-1] // 2
    places = [pl.ds(begin, half) for begin in (0, half)]
    rotate_pairs([source.at[:, place] for place in places], [target.at[:, place] for place in places], rotation)


def rotate_pairs(sources: Sequence[Any], targets: Sequence[Any], rotation: Rotation) -> None:
    """Pairs of numbers, the first and the second ones of each apart, rotated on by angles of their own."""
    first, second = (
        plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32) for source in sources
    )
    cos, sin = (part.astype(jnp.float32) for part in rotation)
    low, high = targets
    low[...] = (first * cos - second * sin).astype(low.dtype)
    high[...] = (second * cos + first * sin).astype(high.dtype)
    plgpu.commit_smem()


def rotated_by(keys: Rotation, first: Rotation) -> Rotation:
    """Angles of keys, [keys, pairs], rotated on by those of the first one, [pairs]: float32."""
    cos, sin = (part.astype(jnp.float32) for part in keys)
    first_cos, first_sin = (lax.broadcast_in_dim(part, cos.shape, [1]) for part in first)
    return Rotation(cos * first_cos - sin * first_sin, sin * first_cos + cos * first_sin)


def rotate_queries_back(halves: tuple[Any, Any], target: Any, rotation: Rotation) -> None:
    """Pairs of all queries, [H / 2, rows] each half, rotated back by the same angles."""
    first, second = halves
    half = first.shape[0]
    cos, sin = (lax.broadcast_in_dim(part, first.shape, [0]) for part in rotation)
    for begin, part in ((0, first * cos + second * sin), (half, second * cos - first * sin)):
        target.at[:, pl.ds(begin, half)].transpose((1, 0))[...] = part.astype(target.dtype)
    plgpu.commit_smem()
