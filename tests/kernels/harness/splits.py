"""Splits whose sum is known."""

import jax
import jax.numpy as jnp

from jattn_kernels import Splits


def splits_of(x, count=3):
    """So many parts that add up to x, about: numbers of x's size, and what they leave; NaN where no row is."""
    rows, columns = x.shape[0], x.shape[1:]
    others = jax.random.normal(jax.random.key(7), (count - 1, rows, *columns))
    parts = jnp.concatenate([others, x.astype(jnp.float32)[None] - others.sum(axis=0, keepdims=True)])
    parts = jnp.pad(parts, ((0, 0), (0, -rows % 4), *[(0, 0)] * len(columns)), constant_values=jnp.nan)
    return Splits(parts=parts, num_rows=rows, dtype=x.dtype)
