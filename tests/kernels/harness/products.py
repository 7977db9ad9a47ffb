"""Products with a layer's weights, called as steps call them, and their operands."""

import jax
import jax.numpy as jnp
import numpy as np

from jattn_kernels import Unnormed, added, taken


def of_last_layer(product, **options):
    """`product` with the number of the last layer traced."""
    return jax.jit(lambda x, kernel, layer: product(x, kernel, layer_index=layer, **options))


def operands(rows, depth, columns, *, layers=2, dtype="bfloat16"):
    """Rows, and the weights of some layers: NaN in all but the last."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, depth)), dtype)
    kernel = jnp.asarray(rng.standard_normal((layers, depth, columns)), dtype)
    return x, kernel.at[:-1].set(jnp.nan)


def unnormed(x, layers=3):
    """Rows of x that the last of some layers' scales is for: NaN in the others."""
    scale = jax.random.uniform(jax.random.key(5), (layers, x.shape[1]), minval=0.5, maxval=2.0).astype(x.dtype)
    return Unnormed(rows=x, scale=scale.at[:-1].set(jnp.nan), layer_index=layers - 1, eps=1e-5, offset=0.5)


def assert_product_of_normed(out, x, kernel):
    """The norm is rounded to x's dtype before the product, and it may be to another last place."""
    normed = np.asarray(taken(x, implementation="xla"), np.float64)
    unit = np.abs(normed) @ np.abs(np.asarray(kernel, np.float64))
    expected = normed @ np.asarray(kernel, np.float64)
    assert np.all(np.abs(np.asarray(added(out), np.float64) - expected) <= float(jnp.finfo(x.dtype).eps) / 8 * unit)
