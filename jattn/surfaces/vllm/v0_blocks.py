"""Moving whole blocks within a cache, between caches, and between device and host."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jattn.arguments import array, check_array, host_integers
from jattn_kernels import copy_pages

AXES = ("2", "num_blocks", "block_size", "num_kv_heads", "head_size")


def copy_blocks(
    kv_caches: list[Float[Array, "2 P page_size K H"]], src_to_dists: Any
) -> list[Float[Array, "2 P page_size K H"]]:
    """The caches with block src copied to block dst for each pair; all copies read what was there before.

    The caches are donated: keep what is returned.

    Args:
        src_to_dists: Pairs [n, 2] of block numbers, on the host or the device; n may be 0.

    Raises:
        ValueError: The pairs are no [n, 2], or a block is not in the caches.
    """
    if not isinstance(kv_caches, list | tuple):
        raise ValueError(f"`kv_caches` must be a list with the cache of each layer. Got {type(kv_caches).__name__}.")
    caches = [array(f"kv_caches[{i}]", cache, *AXES) for i, cache in enumerate(kv_caches)]
    fewest = min((cache.shape[1] for cache in caches), default=2**31)
    src, dst = _pairs("src_to_dists", src_to_dists, fewest, fewest)
    return [_copied(cache, src, dst) for cache in caches]


def swap_blocks(
    src_kv_cache: Float[Any, "2 P page_size K H"], dst_kv_cache: Float[Any, "2 P_dst page_size K H"], src_to_dst: Any
) -> Float[Any, "2 P_dst page_size K H"]:
    """The destination with block src of the source at block dst for each pair, from device to host or back.

    Args:
        src_kv_cache: On the device, or a NumPy array on the host.
        dst_kv_cache: As well. Donated on the device, written in place if NumPy: keep what is returned.
        src_to_dst: As in `copy_blocks`.

    Raises:
        ValueError: The pairs are no [n, 2], a block is not in its cache, or the caches' blocks differ.
    """
    for name, cache in (("src_kv_cache", src_kv_cache), ("dst_kv_cache", dst_kv_cache)):
        check_array(name, cache, *AXES)
    if src_kv_cache.dtype != dst_kv_cache.dtype or src_kv_cache.shape[2:] != dst_kv_cache.shape[2:]:
        raise ValueError(
            "`src_kv_cache` and `dst_kv_cache` must have blocks of one shape and dtype. "
            f"Got {src_kv_cache.shape[2:]} of {src_kv_cache.dtype}, {dst_kv_cache.shape[2:]} of {dst_kv_cache.dtype}."
        )
    src, dst = _pairs("src_to_dst", src_to_dst, src_kv_cache.shape[1], dst_kv_cache.shape[1])
    rows = src_kv_cache[:, src]
    if isinstance(dst_kv_cache, np.ndarray):
        real = dst >= 0
        dst_kv_cache[:, dst[real]] = np.asarray(rows)[:, real]
        return dst_kv_cache
    return _put(dst_kv_cache, jnp.asarray(dst), jnp.asarray(rows))


def _pairs(name: str, given: Any, num_src: int, num_dst: int) -> tuple[np.ndarray, np.ndarray]:
    """Sources and destinations, padded with destination -1 to a power of two: few sizes are compiled."""
    is_empty = isinstance(given, list | tuple) and not given
    pairs = host_integers(name, np.zeros((0, 2), np.int32) if is_empty else given, "n", "2")
    if pairs.shape[1] != 2:
        raise ValueError(f"`{name}` must be pairs of blocks [n, 2]. Got {name}.shape={pairs.shape}.")
    for side, blocks, size in (("source", pairs[:, 0], num_src), ("destination", pairs[:, 1], num_dst)):
        if ((blocks < 0) | (blocks >= size)).any():
            rule = f"`{name}` must have as every {side} a block in 0 .. {size - 1}."
            raise ValueError(f"{rule} Got {blocks.tolist()}.")
    room = 1 << max(len(pairs) - 1, 0).bit_length()
    src, dst = np.pad(pairs, ((0, room - len(pairs)), (0, 0)), constant_values=-1).T
    return np.maximum(src, 0), dst


@functools.partial(jax.jit, donate_argnums=0)
def _copied(cache: Array, src: Array, dst: Array) -> Array:
    return copy_pages(cache, src, dst, axis=1)


@functools.partial(jax.jit, donate_argnums=0)
def _put(cache: Array, dst: Array, rows: Array) -> Array:
    return cache.at[:, jnp.where(dst < 0, cache.shape[1], dst)].set(rows, mode="drop")
