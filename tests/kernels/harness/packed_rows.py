"""Latent rows in bytes, made by NumPy: as another engine writes them, whose scales are no powers of two."""

import ml_dtypes
import numpy as np

_TILE, _MOST = 128, 448.0


def packed(rows: np.ndarray, compressed: int) -> np.ndarray:
    """Rows of floats in bytes; all bits of a row that holds NaN are set, which is NaN in each of its parts."""
    numbers, scales = [], []
    for begin in range(0, compressed, _TILE):
        tile = rows[..., begin : min(begin + _TILE, compressed)].astype(np.float32)
        scale = np.maximum(np.abs(tile).max(axis=-1, keepdims=True), 1e-20) / np.float32(_MOST)
        numbers.append(np.clip(tile / scale, -_MOST, _MOST).astype(ml_dtypes.float8_e4m3fn))
        scales.append(scale)
    rotated = rows[..., compressed:].astype(ml_dtypes.bfloat16)
    parts = np.concatenate(numbers, axis=-1), np.concatenate(scales, axis=-1).astype(np.float32), rotated
    in_bytes = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=-1)
    return np.where(np.isnan(rows).any(axis=-1, keepdims=True), np.uint8(0xFF), in_bytes)
