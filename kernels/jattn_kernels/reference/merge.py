"""The oracle's merging of disjoint parts of the keys."""

from typing import Any

import numpy as np
from jaxtyping import Float

from jattn_kernels.reference.scores import normalise


def merge_states(
    outs: Float[Any, "parts *rows N H"], lses: Float[Any, "parts *rows N"]
) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse over all keys from those of disjoint parts; an empty part (lse -inf) counts for nothing."""
    outs, lses = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
    top = lses.max(axis=0)
    shift = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(lses - shift)
    total = weights.sum(axis=0)
    outs = np.where(np.isneginf(lses)[..., None], 0.0, outs)
    out = (outs * weights[..., None]).sum(axis=0)
    return normalise(out, total, shift)


def merge_state(
    out_a: Float[Any, "*rows N H"],
    lse_a: Float[Any, "*rows N"],
    out_b: Float[Any, "*rows N H"],
    lse_b: Float[Any, "*rows N"],
) -> tuple[np.ndarray, np.ndarray]:
    """`merge_states` of two parts."""
    return merge_states(np.stack([out_a, out_b]), np.stack([lse_a, lse_b]))
