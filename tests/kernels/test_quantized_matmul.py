"""Products with weights in fp8 against the oracle and exact weights, and as they are lowered for GPUs."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jattn_kernels import QuantizedKernel, matmul, quantize_kernel, quantize_rows, reference
from jattn_kernels.call import Device

HALF_STEP = 2.0**-4  # of e4m3, of a number's size
SCALES = {"channel": (24, 1), "tensor": (1, 1), "block": (3, 5)}


def operands(rows=3, depth=40, columns=24, *, scales="channel", dtype="bfloat16"):
    """Rows of very different sizes, and weights with some kind of scales."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, depth)) * np.exp(3 * rng.standard_normal((rows, 1))), dtype)
    values = jnp.asarray(rng.uniform(-448, 448, (columns, depth)), jnp.float8_e4m3fn)
    factors = jnp.asarray(np.exp(rng.standard_normal(SCALES[scales])), jnp.float32)
    return x, QuantizedKernel(values=values, scales=factors)


def assert_product(out, x, kernel):
    """`out` is the oracle's, to its own last place and what a sum in float32 loses."""
    expected = reference.matmul(x, kernel.values, kernel.scales)
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(reference.dequantized(kernel.values, kernel.scales)).T
    tolerance = float(jnp.finfo(out.dtype).eps) * np.abs(expected) + 1e-6 * size
    assert np.all(np.abs(np.asarray(out, np.float64) - expected) <= tolerance)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    ("rows", "dtype", "out_dtype"), [(1, "bfloat16", None), (5, "float16", "float32"), (2, "float32", "bfloat16")]
)
def test_product_is_the_oracles(scales, rows, dtype, out_dtype):
    x, kernel = operands(rows, scales=scales, dtype=dtype)
    out = matmul(x, kernel, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or dtype)
    assert_product(out, x, kernel)


def test_error_beside_exact_weights_is_that_of_rounding_the_rows():
    """Of each number half a step of its size, or of the smallest normal number's size."""
    x, kernel = operands(16, depth=256, dtype="float32")
    weights = reference.dequantized(kernel.values, kernel.scales)
    rows, row_scales = np.asarray(x, np.float64), np.asarray(quantize_rows(x)[1], np.float64)
    off = np.abs(np.asarray(matmul(x, kernel), np.float64) - rows @ weights.T)
    most = np.maximum(np.abs(rows), 2.0**-6 * row_scales) * HALF_STEP
    assert np.all(off <= most @ np.abs(weights).T * (1 + 1e-5))
    relative = np.sqrt(np.mean(off**2) / np.mean((rows @ weights.T) ** 2))
    assert 0.01 < relative < 0.03  # rounding's own: 2^-4 / sqrt(3) of a number's size in its worst place


@pytest.mark.parametrize("scales", SCALES)
def test_layer_of_a_stack_is_read_where_it_lies(scales):
    x, kernel = operands(scales=scales)
    others = QuantizedKernel(values=kernel.values[::-1], scales=jnp.full_like(kernel.scales, jnp.nan))
    stack = jax.tree.map(lambda *layers: jnp.stack(layers), others, kernel)
    out = jax.jit(lambda x, stack, layer: matmul(x, stack, layer_index=layer))(x, stack, jnp.int32(1))
    np.testing.assert_array_equal(out, matmul(x, kernel))


def test_rows_may_have_any_axes():
    x, kernel = operands(6)
    np.testing.assert_array_equal(matmul(x.reshape(2, 3, 40), kernel), matmul(x, kernel).reshape(2, 3, 24))


def test_row_that_is_not_finite_spoils_no_other():
    x, kernel = operands(3, dtype="float32")
    for fault in (jnp.nan, jnp.inf):
        out = np.asarray(matmul(x.at[1, 7].set(fault), kernel))
        assert np.all(np.isnan(out[1]))
        np.testing.assert_array_equal(out[::2], matmul(x, kernel)[::2])


ROWS = {
    "zeros": [0.0, 0.0, -0.0],
    "largest": [1.0, -448.0, 447.0],
    "ties": [448.0, 17.0, 19.0, 2.0**-9 * 2.5, 2.0**-9 * 1.5, 2.0**-10],
    "tiny": [1e-36, -3e-37, 0.0],
    "huge": [3e38, -1e38, 1.0],
}


@pytest.mark.parametrize("row", ROWS)
def test_rounding_of_a_row_is_the_oracles(row):
    x = jnp.asarray([ROWS[row]], jnp.float32)
    values, scales = quantize_rows(x)
    assert (values.dtype, scales.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    expected, factors = reference.quantize_rows(x)
    np.testing.assert_array_equal(values.astype(jnp.float32), expected)
    np.testing.assert_array_equal(scales, factors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounding_of_random_rows_is_the_oracles(dtype):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((64, 257)), dtype)
    expected, factors = reference.quantize_rows(x)
    values, scales = jax.jit(quantize_rows)(x)
    np.testing.assert_array_equal(values.astype(jnp.float32), expected)
    np.testing.assert_array_equal(scales, factors)


def test_oracle_rounds_as_the_dtype_does():
    numbers = np.linspace(-470, 470, 4001).astype(np.float32) * np.float32(2.0) ** np.arange(-12, 1)[:, None]
    numbers = numbers[np.abs(numbers) < 464]  # what is nearer to 480 is NaN there
    np.testing.assert_array_equal(reference.to_e4m3(numbers), numbers.astype(ml_dtypes.float8_e4m3fn).astype(float))


def test_quantised_kernel_has_a_scale_for_each_output():
    kernel = jnp.asarray(np.random.default_rng(2).standard_normal((2, 5, 8)), jnp.bfloat16).at[1, 3].set(0)
    quantised = quantize_kernel(kernel)
    assert (quantised.scales_kind, quantised.scales.shape) == ("channel", (2, 5, 1))
    for layer, weights in enumerate(np.asarray(kernel, np.float64)):
        stands_for = reference.dequantized(quantised.values[layer], quantised.scales[layer])
        most = np.maximum(np.abs(weights), 2.0**-6 * np.asarray(quantised.scales[layer])) * HALF_STEP
        assert np.all(np.abs(stands_for - weights) <= most * (1 + 1e-5))
        np.testing.assert_allclose(np.abs(stands_for).max(axis=1), np.abs(weights).max(axis=1), rtol=1e-6)


@pytest.mark.parametrize(
    ("device", "operand"),
    [(Device("gpu", (9, 0)), "f8E4M3FN"), (Device("gpu", (8, 0)), "bf16"), (Device("cpu"), "f8E4M3FN")],
)
def test_what_xla_is_given_is_a_product_in_fp8_where_the_device_has_one(device, operand, monkeypatch):
    """Both operands have the depth last, as cuBLAS's product in fp8 takes them."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: device)
    _, kernel = operands(depth=64)
    text = jax.jit(functools.partial(matmul, implementation="xla")).lower(jnp.ones((16, 64)), kernel).as_text()
    (product,) = (line for line in text.splitlines() if "dot_general" in line)
    assert "contracting_dims = [1] x [1]" in product
    assert f"(tensor<16x64x{operand}>, tensor<24x64x{operand}>) -> tensor<16x24xf32>" in product


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"x": jnp.ones((2, 24))}, r"`x` must be one of .* last axis of its values. Got .*x.shape=\(2, 24\)"),
        ({"x": jnp.ones((2, 40), jnp.int32)}, "Got x.dtype=int32"),
        ({"values": jnp.ones((24, 40))}, "must have float8_e4m3fn values .* Got values.dtype=float32"),
        ({"scales": jnp.ones((24, 1), jnp.bfloat16)}, "scales.dtype=bfloat16"),
        ({"scales": jnp.ones((5, 1))}, "SF divides F"),
        ({"scales": jnp.ones((2, 24, 1))}, "both perhaps after L"),
        ({"layer_index": 0}, r"\[L, F, D\] and `layer_index` given"),
    ],
)
def test_bad_arguments_get_a_sentence(changes, match):
    x, kernel = operands(2)
    given = {"x": x, "values": kernel.values, "scales": kernel.scales, "layer_index": None} | changes
    kernel = QuantizedKernel(values=given["values"], scales=given["scales"])
    with pytest.raises(ValueError, match=match):
        inspect.unwrap(matmul)(given["x"], kernel, layer_index=given["layer_index"])


def test_layer_that_is_not_there_is_refused():
    x, kernel = operands(2)
    stack = jax.tree.map(lambda leaf: leaf[None], kernel)
    with pytest.raises(ValueError, match="`layer_index` must be in"):
        matmul(x, stack, layer_index=1)


@pytest.mark.parametrize("x", [jnp.ones((2, 3), jnp.int32), jnp.float32(1), [1.0]])
def test_what_has_no_rows_is_not_quantised(x):
    with pytest.raises(ValueError, match="`x` must be"):
        inspect.unwrap(quantize_rows)(x)


def test_derivative_of_a_quantised_product_is_refused():
    x, kernel = operands(2, dtype="float32")
    with pytest.raises(NotImplementedError, match="quantised weights has no derivative"):
        jax.grad(lambda x: jnp.sum(matmul(x, kernel)))(x)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 2048, 2048), (64, 4096, 6144), (2048, 512, 1000)])
def test_product_on_a_gpu_is_in_fp8(rows, depth, columns):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, depth)), jnp.bfloat16)
    kernel = quantize_kernel(jnp.asarray(rng.standard_normal((columns, depth)), jnp.bfloat16))
    compiled = jax.jit(functools.partial(matmul, implementation="xla")).lower(x, kernel).compile()
    text = compiled.as_text() or ""
    assert "f8e4m3fn" in text
    assert not re.search(rf"(bf16|f16|f32)\[(1,)?{columns},{depth}\]", text)  # nowhere are weights made wider
    got, expected = np.asarray(compiled(x, kernel), np.float64), reference.matmul(x, kernel.values, kernel.scales)
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(reference.dequantized(kernel.values, kernel.scales)).T
    # Hopper's tensor cores keep 13 bits behind the point of a sum in fp8 (DeepSeek-V3, arXiv:2412.19437, 3.3.2).
    assert np.all(np.abs(got - expected) <= 2.0**-8 * np.abs(expected) + 2.0**-12 * size)
