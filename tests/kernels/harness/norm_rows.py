"""Rows to be normed, and what their norm is."""

import jax.numpy as jnp
import numpy as np

EPS = 1e-5


def rows(*shape, dtype="float32", key=0):
    """Random ones."""
    return jnp.asarray(np.random.default_rng(key).standard_normal(shape, np.float32) * 3, dtype)


def exact(x, scale, offset=0.0):
    """In float64."""
    x, scale = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * (scale + offset)


def assert_norm(out, x, scale, offset=0.0):
    """`out` is the norm of x, of its dtype and to its last place."""
    expected = exact(x, scale, offset)
    assert out.dtype == x.dtype
    tolerance = float(jnp.finfo(x.dtype).eps)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=1e-6)
