"""Splits that products in few bits leave in bfloat16, beside those in float32; and work tiles of any width."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import QuantizedKernel, matmul_splits
from jattn_kernels.call import Device
from jattn_kernels.mosaic.sm90.fp8 import entry as fp8
from jattn_kernels.mosaic.sm90.int4 import entry as int4
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.products import of_last_layer
from tests.often import slow

ENTRIES = {"int4": int4, "fp8": fp8}
ROUNDING = 2.0**-9  # of bfloat16, at most


def operands(form, rows, depth, columns):
    """Rows, and the weights of two layers."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, depth)), jnp.bfloat16)
    if form == "int4":
        values = jnp.asarray(rng.integers(-8, 8, (2, columns, depth)), jnp.int4)
        scales = jnp.asarray(rng.standard_normal((2, depth // 128, columns)) / 8, jnp.bfloat16)
    else:
        values = jnp.asarray(rng.standard_normal((2, columns, depth)) * 50, jnp.float8_e4m3fn)
        scales = jnp.asarray(rng.uniform(0.01, 0.02, (2, columns, 1)), jnp.float32)
    return x, QuantizedKernel(values=values, scales=scales)


def sum_of(product: Any) -> Any:
    """Of its splits, not rounded."""
    return np.asarray(product, np.float64) if isinstance(product, jax.Array) else np.float64(product.parts).sum(axis=0)


def assert_splits(monkeypatch, form, rows, depth, columns) -> Any:
    """Both kinds add up to about the same; returns the sizes of the rounded one's work tiles."""
    x, kernel = operands(form, rows, depth, columns)
    sizes, choose = [], ENTRIES[form].choose_tiles

    def chosen(**shape):
        sizes.append(choose(**shape))
        return sizes[-1]

    monkeypatch.setattr(ENTRIES[form], "choose_tiles", chosen)
    product = of_last_layer(matmul_splits, implementation="mosaic")
    rounded = product(x, kernel, jnp.int32(1))
    monkeypatch.setattr(ENTRIES[form], "rounds_splits", lambda call: False)
    exact = of_last_layer(matmul_splits, implementation="mosaic")(x, kernel, jnp.int32(1))
    out, expected = (sum_of(each)[:rows] for each in (rounded, exact))
    assert np.linalg.norm(out - expected) <= 1.5 * ROUNDING * np.linalg.norm(expected)  # the other may be rounded too
    if not isinstance(rounded, jax.Array):
        assert rounded.parts.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(rounded.parts[:, rows:], np.float32), 0)
    return sizes[0]


@pytest.mark.parametrize(
    ("form", "rows", "depth", "columns", "width"),
    [
        ("int4", 20, 512, 192, 192),
        slow("int4", 64, 512, 192, 192),  # 256 inputs a stage
        slow("int4", 33, 256, 448, 224),  # of four strips the last two share 32 columns
        slow("int4", 140, 128, 128, 128),  # two blocks of rows
        ("fp8", 20, 1024, 384, 96),  # two strips share 32 columns
        slow("fp8", 64, 256, 896, 112),  # and 16, of a result that is not split
        slow("fp8", 140, 1024, 256, 128),
    ],
)
def test_rounded_splits_add_up(monkeypatch, form, rows, depth, columns, width):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 4))
    with interpreted():
        sizes = assert_splits(monkeypatch, form, rows, depth, columns)
    assert sizes.block_columns == width


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int4", "fp8"])
@pytest.mark.parametrize("rows", [17, 50, 64, 200])
@pytest.mark.parametrize(("depth", "columns"), [(4096, 6144), (14336, 4096), (4096, 28672)])
def test_rounded_splits_on_a_gpu(monkeypatch, form, rows, depth, columns):
    assert_splits(monkeypatch, form, rows, depth, columns)
