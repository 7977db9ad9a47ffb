"""Hopper's product with weights in fp8: under the interpreter against the oracle, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import (
    QuantizedKernel,
    QuantizedRows,
    Splits,
    Ungated,
    Unnormed,
    add_rms_norm,
    added,
    matmul,
    matmul_splits,
    quantize_rows,
    reference,
    rms_norm,
    taken,
)
from jattn_kernels.call import Device
from jattn_kernels.lowering.expert_groups import silu_gate
from jattn_kernels.mosaic.sm90.common import shared_row
from jattn_kernels.ungated import gated
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.products import of_last_layer
from tests.often import slow

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
        (1, 1024, 128, "bfloat16", None),  # in splits; a row that is rounded here
        slow(1, 384, 64, "bfloat16", None),
        (5, 384, 64, "float16", None),  # rows that no kernel rounds
        (3, 1024, 192, "bfloat16", "float32"),
        (20, 256, 128, "bfloat16", None),  # two consumers
        slow(260, 128, 64, "bfloat16", None),  # two blocks of rows
        slow(140, 128, 64, "bfloat16", "float32"),  # and their sums
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
    assert_product(added(out), taken(unnormed(x), implementation="xla"), kernel, 2.0**-9, ties=True)


def ungated(rows, columns):
    rng = np.random.default_rng(1)
    return Ungated(rows=jnp.asarray(rng.standard_normal((rows, 2 * columns)), jnp.bfloat16), activation=silu_gate)


def activated(x):
    """Its rows by the formula in float32."""
    gate, up = jnp.split(x.rows.astype(jnp.float32), 2, axis=-1)
    return silu_gate(gate, up).astype(x.dtype)


def test_kernel_activates_rows_without_races(hopper, monkeypatch):
    monkeypatch.setattr(shared_row, "FEWEST_ROWS", 2)
    (_, kernel), x = operands(2, 3072, 64), ungated(2, 3072)  # a row is shared by three warpgroups
    with interpreted():
        out = of_last_layer(matmul, implementation="mosaic", out_dtype="float32")(x, kernel, jnp.int32(1))
    assert_product(out, activated(x), kernel, 2.0**-9, ties=True)


def test_activation_is_taken_before_where_no_kernel_takes_it(hopper):
    (_, kernel), x = operands(2, 384, 64), ungated(2, 384)
    before = matmul(gated(x), kernel, layer_index=1, implementation="xla")
    np.testing.assert_array_equal(matmul(x, kernel, layer_index=1, implementation="xla"), before)
    with interpreted():  # 384 numbers of a row are no multiple of 1,024
        out = matmul(x, kernel, layer_index=1, implementation="mosaic")
    np.testing.assert_allclose(out, before, rtol=2.0**-7)


def sum_to_norm(rows, columns):
    """Rows, what is added to them in splits, and the scales of layers."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((rows, columns)), jnp.bfloat16)
    parts = jnp.asarray(rng.standard_normal((3, rows, columns)), jnp.float32)
    return x, Splits(parts=parts, num_rows=rows, dtype=x.dtype), unnormed(x).scale


def assert_rounded_sum(results, x, splits, scale):
    """The sum, and its norm in fp8, but for ties and the last place of what is rounded."""
    total, rounded = results
    normed = rms_norm(total, scale, eps=1e-5, layer_index=2, implementation="xla")
    assert isinstance(rounded, QuantizedRows)
    assert rounded.shape == x.shape
    np.testing.assert_allclose(np.asarray(total, np.float32), np.asarray(x + added(splits), np.float32), rtol=2.0**-6)
    values, scales = quantize_rows(normed)
    np.testing.assert_allclose(rounded.scales[: len(x)], scales[:, 0], rtol=2.0**-7)
    here = np.asarray(rounded.values[: len(x)], np.float32) * np.asarray(rounded.scales[: len(x), None])
    np.testing.assert_allclose(here, np.asarray(values, np.float32) * np.asarray(scales), rtol=0.14, atol=1e-3)
    assert np.mean(np.asarray(rounded.values[: len(x)], np.float32) != np.asarray(values, np.float32)) < 0.02


@pytest.mark.parametrize(("rows", "columns"), [(9, 1024), (9, 1088), (2, 3072)])  # few rows are shared by warpgroups
def test_norm_of_a_sum_is_rounded_without_races(hopper, rows, columns, monkeypatch):
    monkeypatch.setattr(shared_row, "FEWEST_ROWS", 2)
    x, splits, scale = sum_to_norm(rows, columns)
    with interpreted():
        results = add_rms_norm(x, splits, scale, eps=1e-5, layer_index=2, rounded=True, implementation="mosaic")
    assert_rounded_sum(results, x, splits, scale)


def test_norm_of_a_sum_stays_as_it_is_where_no_kernel_rounds_it():
    x, splits, scale = sum_to_norm(2, 1024)
    _, normed = add_rms_norm(x, splits, scale, eps=1e-5, layer_index=2, rounded=True)
    assert normed.dtype == x.dtype


@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_rows_that_are_rounded_already_are_not_rounded_again(hopper, implementation):
    x, kernel = operands(9, 1024, 64)
    values, scales = quantize_rows(x)
    held = jnp.full((16, 1024), jnp.nan, values.dtype).at[:9].set(values)
    scales = jnp.full(256, jnp.nan).at[:9].set(scales[:, 0])
    rows = QuantizedRows(values=held, scales=scales, num_rows=9, dtype=x.dtype)
    with interpreted():
        splits = of_last_layer(matmul_splits, implementation=implementation)(rows, kernel, jnp.int32(1))
        assert not np.any(np.isnan(splits.parts) if isinstance(splits, Splits) else np.isnan(splits))
        assert_product(added(splits), x, kernel, SUMS_IN_F32)
    with pytest.raises(ValueError, match="need a QuantizedKernel in fp8"):
        matmul(rows, jnp.ones((1024, 64), x.dtype))


@pytest.mark.parametrize("rows", [1, 16, 64, 300])
@pytest.mark.parametrize(("depth", "columns"), [(4096, 6144), (14336, 4096), (640, 64)])
def test_kernel_is_lowered_for_cuda(monkeypatch, rows, depth, columns):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    x = jax.ShapeDtypeStruct((rows, depth), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((2, columns, depth), jnp.float8_e4m3fn)
    kernel = QuantizedKernel(values=values, scales=jax.ShapeDtypeStruct((2, columns, 1), jnp.float32))
    traced = of_last_layer(matmul, implementation="mosaic").trace(x, kernel, jax.ShapeDtypeStruct((), jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1 + (depth % 1024 == 0 and rows > 1)


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
    assert_product(added(out), taken(unnormed(x), implementation="xla"), kernel, 2.0**-9, ties=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 300])
@pytest.mark.parametrize("columns", [1024, 14336])
def test_kernel_activates_rows_on_a_gpu(rows, columns):
    (_, kernel), x = operands(rows, columns, 1024), ungated(rows, columns)
    out = of_last_layer(matmul, implementation="mosaic")(x, kernel, jnp.int32(1))
    assert_product(out, activated(x), kernel, 2.0**-9, ties=True)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [2880, 4096])
def test_norm_of_a_sum_is_rounded_on_a_gpu(columns):
    x, splits, scale = sum_to_norm(65, columns)
    results = add_rms_norm(x, splits, scale, eps=1e-5, layer_index=2, rounded=True, implementation="mosaic")
    assert_rounded_sum(results, x, splits, scale)
