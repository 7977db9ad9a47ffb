"""Which keys a query sees: one small rule each, of absolute positions."""

import numpy as np

from jattn_kernels.spec import AttentionSpec


def visible_keys(
    p: np.ndarray, j: np.ndarray, *, spec: AttentionSpec, custom_mask: np.ndarray | None = None
) -> np.ndarray:
    """Which of the keys at positions `j` [S] the queries at `p` [Q] see: all active rules together, bool [Q, S]."""
    p, j = p[:, None], j[None, :]
    rules = [np.broadcast_to(True, np.broadcast_shapes(p.shape, j.shape))]
    if custom_mask is not None:
        rules.append(custom_mask)
    elif spec.causal:
        rules.append(causal(p, j))
    if spec.window_left is not None:
        rules.append(within_left(p, j, spec.window_left))
    if spec.window_right is not None:
        rules.append(within_right(p, j, spec.window_right))
    if spec.chunk_size is not None:
        rules.append(same_chunk(p, j, spec.chunk_size))
    return np.logical_and.reduce(rules)


def causal(p: np.ndarray, j: np.ndarray) -> np.ndarray:
    """The key is not after the query."""
    return j <= p


def within_left(p: np.ndarray, j: np.ndarray, left: int) -> np.ndarray:
    """The key is at most `left` before the query."""
    return j >= p - left


def within_right(p: np.ndarray, j: np.ndarray, right: int) -> np.ndarray:
    """The key is at most `right` after the query."""
    return j <= p + right


def same_chunk(p: np.ndarray, j: np.ndarray, size: int) -> np.ndarray:
    """Key and query are in the same chunk; chunks begin at multiples of `size`, also below 0."""
    return j // size == p // size
