"""Norms of the residual stream and of heads, as models use them."""

from jattn_kernels import (
    HeadNorms,
    NormedRows,
    Unnormed,
    add_rms_norm,
    normed_heads,
    rms_norm,
    summed_and_normed,
    taken,
)

__all__ = [
    "HeadNorms",
    "NormedRows",
    "Unnormed",
    "add_rms_norm",
    "normed_heads",
    "rms_norm",
    "summed_and_normed",
    "taken",
]
