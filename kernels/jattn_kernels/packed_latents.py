"""Latent rows in bytes, as DeepSeek's fp8 caches hold them: "fp8 with scale" in FlashMLA, "fp8_ds_mla" in vLLM.

A row, all of it side by side:

    C numbers of e4m3 | a float32 scale for each 128 of them | R rotated numbers of bfloat16

which is 512 + 16 + 128 = 656 bytes in DeepSeek's models. One array of bytes, whose dtype alone says what it holds: it
is copied, donated and shared as other pages are, a token's row is one piece of memory, and what other engines store is
read as it is.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

DTYPE = "uint8"  # of arrays of such rows, and of no others
TILE = 128  # numbers that share a scale
_NARROW, _ROTATED, _SCALE = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
SCALE_BYTES = jnp.dtype(_SCALE).itemsize
_MOST = float(jnp.finfo(_NARROW).max)
_EXPONENTS = 1, 246  # of scales: float32 has the largest number times the largest scale, 2^119, still


def is_packed(dtype: Any) -> bool:
    """Whether arrays of a dtype hold such rows."""
    return jnp.dtype(dtype).name == DTYPE


def packed_width(compressed: int, rotated: int) -> int:
    """Bytes of a row of so many numbers."""
    return rotated_begin(compressed) + rotated * jnp.dtype(_ROTATED).itemsize


def unpacked_width(width: int, compressed: int) -> int:
    """Numbers of a row of so many bytes, of which so many are compressed."""
    return compressed + (width - rotated_begin(compressed)) // jnp.dtype(_ROTATED).itemsize


def rotated_begin(compressed: int) -> int:
    """The byte at which a row's rotated part begins; that at which its scales do is `compressed`."""
    return compressed + -(-compressed // TILE) * SCALE_BYTES


def pack_latents(c_kv: Float[Array, "T C"], k_pe: Float[Array, "T R"]) -> UInt8[Array, "T bytes"]:
    """Rows in bytes, each tile divided by its scale.

    A scale is the smallest power of two with which the largest number of its tile is in range: so a number that is read
    back is one of bfloat16, exactly. Infinities become the largest number that there is.
    """
    num_tokens, compressed = c_kv.shape
    tiles = jnp.pad(c_kv.astype(jnp.float32), ((0, 0), (0, -compressed % TILE))).reshape(num_tokens, -1, TILE)
    scales = scales_of(jnp.abs(tiles).max(axis=-1))
    numbers = jnp.clip(tiles / scales[..., None], -_MOST, _MOST).reshape(num_tokens, -1)[:, :compressed]
    parts = numbers.astype(_NARROW), scales, k_pe.astype(_ROTATED)
    return jnp.concatenate([_bytes_of(part) for part in parts], axis=-1)


def unpack_latents(rows: UInt8[Array, "*T bytes"], compressed: int) -> Float32[Array, "*T W"]:
    """The numbers of rows whose compressed part is so wide."""
    scales_end = rotated_begin(compressed)
    scales = _of_bytes(rows[..., compressed:scales_end], _SCALE)
    of_numbers = jnp.repeat(scales, TILE, axis=-1)[..., :compressed]
    c_kv = _of_bytes(rows[..., :compressed], _NARROW).astype(jnp.float32) * of_numbers
    return jnp.concatenate([c_kv, _of_bytes(rows[..., scales_end:], _ROTATED).astype(jnp.float32)], axis=-1)


def scales_of(largest: Float32[Array, "*tiles"]) -> Float32[Array, "*tiles"]:
    """The scale of tiles with these largest sizes: a power of two, rounded up in the exponent's bits.

    With 1.75 x 2^8 for the largest number of e4m3, a fraction of more than 0.75 asks for the next exponent.
    """
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    exponent = ((bits + 0x1FFFFF) >> 23) - 8
    rounded = jnp.clip(exponent, *_EXPONENTS) << 23
    return jax.lax.bitcast_convert_type(rounded, _SCALE)


def _bytes_of(x: Array) -> UInt8[Array, "T bytes"]:
    in_bytes = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return in_bytes.reshape(x.shape[0], -1)


def _of_bytes(x: UInt8[Array, "*T bytes"], dtype: Any) -> Array:
    size = jnp.dtype(dtype).itemsize
    return jax.lax.bitcast_convert_type(x if size == 1 else x.reshape(*x.shape[:-1], -1, size), dtype)
