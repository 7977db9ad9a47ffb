"""Hopper's product with weights in fp8: under the interpreter against the oracle, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import QuantizedKernel, Unnormed, matmul, matmul_splits, reference, taken
from jattn_kernels.call import Device
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.products import of_last_layer

SUMS_IN_F32 = 1e-6  # of a product's size
CUT_OFF = 2.0**-13  # of the largest of what Hopper's tensor cores add at once: DeepSeek-V3, arXiv:2412.19437, 3.3.2
AT_ONCE = 32  # products that they add to a sum
DEVIATIONS = 8  # of numbers that are rounded to the other side, each on its own


def operands(rows, depth, columns, *, layers=2, dtype="bfloat16"):
    """Rows of different sizes, and the weights of some layers: NaN in all but the last."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, depth)) * np.exp(rng.standard_normal((rows, 1))), dtype)
    values = jnp.asarray(rng.uniform(-448, 448, (layers, columns, depth)), jnp.float8_e4m3fn)
    scales = jnp.asarray(np.exp(rng.standard_normal((layers, columns, 1))) / 448, jnp.float32)
    nan = jnp.full_like(values[:-1], jnp.nan)
    return x, QuantizedKernel(values=values.at[:-1].set(nan), scales=scales.at[:-1].set(jnp.nan))


def unnormed(x):
    """Rows that the last of some layers' scales is for: NaN in the others."""
    scale = jax.random.uniform(jax.random.key(5), (3, x.shape[1]), minval=0.5, maxval=2.0).astype(x.dtype)
    return Unnormed(rows=x, scale=scale.at[:-1].set(jnp.nan), layer_index=2, eps=1e-5, offset=0.5)


def lost_on_hopper(x, kernel):
    """The most that sums in its tensor cores lose: each addition cuts off bits of the sum so far, and of its products.

    A sum over the whole depth loses more the longer it is, which rows of a batch too large for splits have.
    """
    rows, weights = (np.asarray(part, np.float32) for part in (x, last_layer(kernel)))
    total, lost = (np.zeros((rows.shape[0], weights.shape[0]), np.float32) for _ in range(2))
    size = np.zeros_like(total)
    for begin in range(0, rows.shape[1], AT_ONCE):
        own = [part[:, begin : begin + AT_ONCE] for part in (rows, weights)]
        total += own[0] @ own[1].T
        np.maximum(size, np.abs(total), out=size)  # of the sum before too
        lost += size
        lost += np.abs(own[0]) @ np.abs(own[1]).T
        np.abs(total, out=size)
    return CUT_OFF * lost


def last_layer(kernel):
    return reference.dequantized(kernel.values[-1], kernel.scales[-1])


def assert_product(out, x, kernel, sums, *, ties=False):
    """`out` is the oracle's of the last layer, to its own last place and what the sums lose.

    Args:
        sums: What they lose, as a share of the product of sizes; or an array, the most that each may lose.
        ties: Whether a number of a row just between two of fp8 may be rounded either way, as a GPU's division and
            conversion may: rows of bfloat16 have many of them.
    """
    values, scales = kernel.values[-1], kernel.scales[-1]
    rows, weights = np.asarray(x, np.float64), reference.dequantized(values, scales)
    expected = reference.matmul(x, values, scales)
    tolerance = float(jnp.finfo(out.dtype).eps) * np.abs(expected)
    tolerance += sums if isinstance(sums, np.ndarray) else sums * (np.abs(rows) @ np.abs(weights).T)
    if ties:
        factors = reference.quantize_rows(x)[1]
        below, above = (reference.to_e4m3(rows / factors * (1 + off)) for off in (-1e-3, 1e-3))
        tolerance += DEVIATIONS * np.sqrt(((above - below) * factors) ** 2 @ weights.T**2)
    assert np.all(np.abs(np.asarray(out, np.float64) - expected) <= tolerance)


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU, of few SMs so that each has several work tiles."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 4))


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "dtype", "out_dtype"),
    [
        (1, 1024, 128, "bfloat16", None),  # in splits
        (5, 384, 64, "float16", None),  # rows that no kernel rounds
        (3, 1024, 192, "bfloat16", "float32"),
        (20, 256, 128, "bfloat16", None),  # two consumers
        (260, 128, 64, "bfloat16", None),  # two blocks of rows
        (140, 128, 64, "bfloat16", "float32"),  # and their sums
    ],
)
def test_kernel_without_races(hopper, rows, depth, columns, dtype, out_dtype):
    x, kernel = operands(rows, depth, columns, dtype=dtype)
    with interpreted():
        out = of_last_layer(matmul, implementation="mosaic", out_dtype=out_dtype)(x, kernel, jnp.int32(1))
    assert out.dtype == (out_dtype or dtype)
    assert_product(out, x, kernel, SUMS_IN_F32)


def test_row_of_zeros_and_row_with_nan(hopper):
    x, kernel = operands(3, 1024, 64)
    with interpreted():
        out = of_last_layer(matmul, implementation="mosaic")(x.at[0].set(0).at[1, 5].set(jnp.nan), kernel, jnp.int32(1))
    np.testing.assert_array_equal(out[0], 0)
    assert np.all(np.isnan(out[1]))
    assert_product(out[2:], x[2:], kernel, SUMS_IN_F32)


def test_kernel_norms_rows_without_races(hopper):
    x, kernel = operands(2, 1024, 64)
    with interpreted():
        out = of_last_layer(matmul_splits, implementation="mosaic", out_dtype="float32")(
            unnormed(x), kernel, jnp.int32(1)
        )
    assert_product(out, taken(unnormed(x), implementation="xla"), kernel, 2.0**-9, ties=True)


@pytest.mark.parametrize("rows", [1, 16, 64, 300])
@pytest.mark.parametrize(("depth", "columns"), [(4096, 6144), (14336, 4096), (640, 64)])
def test_kernel_is_lowered_for_cuda(monkeypatch, rows, depth, columns):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    x = jax.ShapeDtypeStruct((rows, depth), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((2, columns, depth), jnp.float8_e4m3fn)
    kernel = QuantizedKernel(values=values, scales=jax.ShapeDtypeStruct((2, columns, 1), jnp.float32))
    traced = of_last_layer(matmul, implementation="mosaic").trace(x, kernel, jax.ShapeDtypeStruct((), jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1 + (depth % 1024 == 0)


@pytest.mark.parametrize(
    ("shape", "columns", "scales", "match"),
    [
        ((2, 256), 96, (96, 1), "a multiple of 64 columns of fp8 weights, not 2 rows"),
        ((2, 264), 64, (64, 1), "rows of a multiple of 128 numbers"),
        ((0, 256), 64, (64, 1), "some rows"),
        ((2, 256), 64, (1, 2), "scales of each block"),
    ],
)
def test_what_is_not_served_gets_a_sentence(hopper, shape, columns, scales, match):
    values = jnp.zeros((columns, shape[1]), jnp.float8_e4m3fn)
    kernel = QuantizedKernel(values=values, scales=jnp.ones(scales, jnp.float32))
    with pytest.raises(NotImplementedError, match=match):
        matmul(jnp.ones(shape, jnp.bfloat16), kernel, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 17, 64, 256, 1000])
@pytest.mark.parametrize(
    ("depth", "columns", "dtype"),
    [(4096, 6144, "bfloat16"), (2048, 4096, "float16"), (384, 320, "bfloat16"), (14336, 1024, "bfloat16")],
)
def test_kernel_on_a_gpu(rows, depth, columns, dtype):
    x, kernel = operands(rows, depth, columns, dtype=dtype)
    lost = lost_on_hopper(x, kernel)
    for out_dtype in (None, "float32"):
        out = of_last_layer(matmul, implementation="mosaic", out_dtype=out_dtype)(x, kernel, jnp.int32(1))
        assert_product(out, x, kernel, lost, ties=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64])
def test_kernel_norms_rows_on_a_gpu(rows):
    x, kernel = operands(rows, 4096, 1024)
    out = of_last_layer(matmul_splits, implementation="mosaic")(unnormed(x), kernel, jnp.int32(1))
    assert_product(out, taken(unnormed(x), implementation="xla"), kernel, 2.0**-9, ties=True)
