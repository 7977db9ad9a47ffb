"""Latent rows in bytes (FlashMLA's "fp8 with scale"): what they stand for, in float64."""

from typing import Any

import ml_dtypes
import numpy as np

_TILE = 128  # numbers of fp8 that share a scale


def unpacked(rows: np.ndarray, compressed: int) -> np.ndarray:
    """Float64 numbers of rows of bytes: so many of e4m3, a float32 scale for each 128 of them, the rest of bfloat16."""
    scales_end = compressed + 4 * -(-compressed // _TILE)
    numbers = _viewed(rows[..., :compressed], ml_dtypes.float8_e4m3fn)
    scales = _viewed(rows[..., compressed:scales_end], np.float32)
    rotated = _viewed(rows[..., scales_end:], ml_dtypes.bfloat16)
    of_tile = np.arange(compressed) // _TILE
    return np.concatenate([numbers * scales[..., of_tile], rotated], axis=-1)


def _viewed(rows: np.ndarray, dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(rows).view(dtype).astype(np.float64)
