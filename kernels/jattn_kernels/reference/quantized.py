"""The oracle's fp8 and int4: how numbers are rounded to e4m3, and products of rows with quantised weights."""

from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int, Shaped

_LARGEST = 448.0  # of e4m3
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # what its codes without a sign stand for
_MANTISSA_BITS, _LEAST_EXPONENT = 3, -6  # numbers below 2^-6 stand 2^-9 apart


def to_e4m3(x: Float[Any, "*shape"]) -> np.ndarray:
    """The nearest numbers that e4m3 has, of two the one with an even last bit; 448 at most."""
    x = np.asarray(x, np.float64)
    _, exponents = np.frexp(x)
    step = np.exp2(np.maximum(exponents - 1, _LEAST_EXPONENT) - _MANTISSA_BITS)
    return np.clip(np.rint(x / step) * step, -_LARGEST, _LARGEST)


def quantize_rows(x: Float[Any, "*rows D"]) -> tuple[np.ndarray, np.ndarray]:
    """Rows as e4m3 has them, and their factors: in float32 the largest number's size times 1 / 448, and 1 of zeros.

    A factor is at least the smallest normal number.
    """
    x = np.asarray(x, np.float32)
    largest = np.abs(x).max(axis=-1, keepdims=True, initial=0)
    scales = np.maximum(largest * np.float32(1 / _LARGEST), np.finfo(np.float32).tiny)
    scales = np.where(largest == 0, np.float32(1), scales)
    return to_e4m3(x / scales), scales


def dequantized(
    values: Shaped[Any, "F D"], scales: Shaped[Any, "SF SD"], zero_points: Int[Any, "SF SD"] | None = None
) -> np.ndarray:
    """What weights in blocks stand for; those of int4 and mxfp4 have their scales, and zero points, inputs first."""
    if np.asarray(values).dtype == np.uint8:
        codes = np.stack([np.asarray(values) & 15, np.asarray(values) >> 4], axis=-1).reshape(len(values), -1)
        values = np.where(codes & 8, -1, 1) * np.array(_E2M1)[codes & 7]
        scales = np.exp2(np.asarray(scales, np.float64).T - 127)
    elif np.asarray(values).dtype == ml_dtypes.int4:
        scales, zero_points = (None if each is None else np.asarray(each).T for each in (scales, zero_points))

    def of_each(blocks: np.ndarray) -> np.ndarray:
        for axis in range(2):
            blocks = np.repeat(blocks, values.shape[axis] // blocks.shape[axis], axis=axis)
        return blocks

    values = np.asarray(values, np.float64)
    zeros = 0.0 if zero_points is None else of_each(np.asarray(zero_points, np.float64))
    return (values - zeros) * of_each(np.asarray(scales, np.float64))


def matmul(
    x: Float[Any, "T D"],
    values: Shaped[Any, "F D"],
    scales: Float[Any, "SF SD"],
    zero_points: Int[Any, "SF SD"] | None = None,
) -> np.ndarray:
    """Rows times what the weights stand for; beside fp8 quantised, by as many scales as weights have in depth."""
    x = np.asarray(x)
    if np.asarray(values).dtype == ml_dtypes.int4:
        return x.astype(np.float64) @ dequantized(values, scales, zero_points).T
    rows, row_scales = quantize_rows(x.reshape(x.shape[0], np.shape(scales)[1], -1))
    return (rows * row_scales).reshape(x.shape) @ dequantized(values, scales).T
