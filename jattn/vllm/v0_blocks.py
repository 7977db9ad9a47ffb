"""Moving whole blocks within a cache, between caches, and between device and host."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jattn_kernels import copy_pages


def copy_blocks(
    kv_caches: list[Float[Array, "2 P page_size K H"]], src_to_dists: Int[Any, "n 2"]
) -> list[Float[Array, "2 P page_size K H"]]:
    """The donated caches with block src copied to block dst for each pair."""
    src, dst = _pairs(src_to_dists, *(kv_caches[0].shape[1],) * 2) if kv_caches else (None, None)
    return [_copied(cache, src, dst) for cache in kv_caches]


def swap_blocks(
    src_kv_cache: Float[Any, "2 P page_size K H"],
    dst_kv_cache: Float[Any, "2 P_dst page_size K H"],
    src_to_dst: Int[Any, "n 2"],
) -> Float[Any, "2 P_dst page_size K H"]:
    """The destination, donated or written in place, with block src of the source at block dst for each pair."""
    src, dst = _pairs(src_to_dst, src_kv_cache.shape[1], dst_kv_cache.shape[1])
    rows = src_kv_cache[:, src]
    if isinstance(dst_kv_cache, np.ndarray):
        real = dst >= 0
        dst_kv_cache[:, dst[real]] = np.asarray(rows)[:, real]
        return dst_kv_cache
    return _put(dst_kv_cache, jnp.asarray(dst), jnp.asarray(rows))


def _pairs(pairs: Any, num_src: int, num_dst: int) -> tuple[np.ndarray, np.ndarray]:
    """Sources and destinations, padded with destination -1 to a power of two: few sizes are compiled."""
    pairs = np.asarray(pairs, np.int32)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"The pairs of blocks must be [n, 2]. Got shape {pairs.shape}.")
    for name, blocks, size in (("source", pairs[:, 0], num_src), ("destination", pairs[:, 1], num_dst)):
        if ((blocks < 0) | (blocks >= size)).any():
            raise ValueError(f"Every {name} must be a block in 0 .. {size - 1}. Got {blocks.tolist()}.")
    room = 1 << max(len(pairs) - 1, 0).bit_length()
    src, dst = np.pad(pairs, ((0, room - len(pairs)), (0, 0)), constant_values=-1).T
    return np.maximum(src, 0), dst


@functools.partial(jax.jit, donate_argnums=0)
def _copied(cache: Array, src: Array, dst: Array) -> Array:
    return copy_pages(cache, src, dst, axis=1)


@functools.partial(jax.jit, donate_argnums=0)
def _put(cache: Array, dst: Array, rows: Array) -> Array:
    return cache.at[:, jnp.where(dst < 0, cache.shape[1], dst)].set(rows, mode="drop")
