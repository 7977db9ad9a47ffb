"""Products with weights in int4 against the oracle and exact weights, and rounding to them."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import (
    QuantizedKernel,
    Ungated,
    dequantize_groups,
    interleave,
    matmul,
    matmul_gated,
    mixture_of_experts,
    quantize_groups,
    reference,
)
from jattn_kernels.call import Device
from jattn_kernels.ungated import gated

ROWS, DEPTH, COLUMNS = 3, 48, 24
ROUNDINGS = {"float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-10}  # of a weight's size


def operands(rows=ROWS, *, groups=3, zero_points=True, dtype="bfloat16", scales="float32", layers=()):
    rng = np.random.default_rng(0)
    shape = (*layers, groups, COLUMNS)
    x = jnp.asarray(rng.standard_normal((rows, DEPTH)), dtype)
    kernel = QuantizedKernel(
        values=jnp.asarray(rng.integers(-8, 8, (*layers, COLUMNS, DEPTH)), jnp.int4),
        scales=jnp.asarray(np.exp(rng.standard_normal(shape)) * rng.choice([-1, 1], shape), scales),
        zero_points=jnp.asarray(rng.integers(-8, 9, shape), jnp.int8) if zero_points else None,
    )
    return x, kernel


def stands_for(kernel):
    """A number at a time, as the formula has it."""
    values = np.asarray(kernel.values, np.float64)
    weights, size = np.empty_like(values), values.shape[1] // kernel.scales.shape[0]
    for output, number in np.ndindex(values.shape):
        group = number // size, output
        zero = 0 if kernel.zero_points is None else int(kernel.zero_points[group])
        weights[output, number] = float(kernel.scales[group]) * (values[output, number] - zero)
    return weights


@pytest.mark.parametrize(
    ("case", "dtype", "out_dtype"),
    [
        ({}, "bfloat16", None),
        ({"zero_points": False, "scales": "float16"}, "float16", "float32"),
        ({"groups": 1, "scales": "bfloat16", "rows": 1}, "float32", None),
        ({"groups": 1, "rows": 9}, "bfloat16", "float32"),
        ({"groups": 48, "rows": 1}, "bfloat16", "float32"),
    ],
)
def test_product_is_that_of_what_the_weights_stand_for(case, dtype, out_dtype):
    """Each weight is off by half a step of the rows' dtype at most."""
    x, kernel = operands(**case, dtype=dtype)
    weights = stands_for(kernel)
    exact = np.asarray(x, np.float64) @ weights.T
    np.testing.assert_allclose(reference.matmul(x, kernel.values, kernel.scales, kernel.zero_points), exact, rtol=1e-12)
    out = matmul(x, kernel, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or dtype)
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(weights).T
    off = np.abs(np.asarray(out, np.float64) - exact)
    assert np.all(off <= float(jnp.finfo(out.dtype).eps) * np.abs(exact) + (ROUNDINGS[dtype] / 2 + 1e-6) * size)


def test_error_is_small_beside_that_of_rounding_the_weights():
    """By the root mean square: the second is 1 / sqrt(12) of a step of some 6 a deviation, the first 2^-9 at most."""
    rng = np.random.default_rng(1)
    x, weights = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((16, 512), (64, 512)))
    kernel = quantize_groups(weights, 128)
    exact = reference.matmul(x, kernel.values, kernel.scales)
    unrounded = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    norm = np.linalg.norm(unrounded)
    assert np.linalg.norm(np.asarray(matmul(x, kernel, out_dtype="float32")) - exact) < 0.002 * norm
    assert 0.07 * norm < np.linalg.norm(exact - unrounded) < 0.11 * norm


@pytest.mark.parametrize("zero_points", [True, False])
def test_layer_of_a_stack_is_read_where_it_lies(zero_points):
    x, stack = operands(layers=(3,), zero_points=zero_points)
    compiled = jax.jit(lambda x, stack, layer: matmul(x, stack, layer_index=layer)).lower(x, stack, jnp.int32(1))
    text = compiled.compile().as_text() or ""
    wide = re.findall(rf"(?:bf16|f32)\[3,{COLUMNS},{DEPTH}\]", text)
    assert not wide, "all layers' weights are made wider"
    for layer in range(3):
        alone = jax.tree.map(lambda leaf: leaf[layer], stack)  # noqa: B023
        np.testing.assert_array_equal(matmul(x, stack, layer_index=layer), matmul(x, alone))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interleaved_weights_are_the_same_weights(dtype):
    rng = np.random.default_rng(4)
    x, weights = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((5, 96), (2, 24, 96)))
    kernel = quantize_groups(weights, 32)
    held = interleave(kernel)
    for pair, thread, side in np.ndindex(4, 4, 2):  # the tensor cores' order of 32 inputs, and a thread's of 8
        place, own = 8 * thread + 4 * side + pair, 8 * pair + 2 * thread + side
        np.testing.assert_array_equal(held.values[..., place::32], kernel.values[..., own::32])
    assert (held.interleaved, interleave(held) is held) == (True, True)
    np.testing.assert_array_equal(dequantize_groups(held, dtype), dequantize_groups(kernel, dtype))
    np.testing.assert_array_equal(matmul(x, held, layer_index=1), matmul(x, kernel, layer_index=1))


def test_weights_in_smaller_groups_are_not_interleaved():
    x, kernel = operands()
    assert interleave(kernel) is kernel
    with pytest.raises(ValueError, match="may be interleaved only in int4, with groups of a multiple of 32 inputs"):
        matmul(x, dataclasses.replace(kernel, interleaved=True))


def test_activation_of_a_product_is_taken_after_it_by_xla():
    x, kernel = operands(20)
    ungated = matmul_gated(x, kernel, jnp.multiply)
    assert isinstance(ungated, Ungated)
    gate, up = np.split(np.asarray(matmul(x, kernel)), 2, axis=1)
    np.testing.assert_array_equal(gated(ungated), gate * up)


def test_rows_may_have_any_axes():
    x, kernel = operands(6)
    np.testing.assert_array_equal(matmul(x.reshape(2, 3, DEPTH), kernel), matmul(x, kernel).reshape(2, 3, COLUMNS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_int4_holds_are_held(dtype):
    """Scales with few bits; groups whose largest number is -8, 7 or 6 of either sign, and one of zeros."""
    rng = np.random.default_rng(2)
    values = rng.integers(-5, 6, (2, 8, 3, 16))
    values[..., 0] = rng.choice([-8, 8, 7, -7, 6, -6], values.shape[:-1])
    values[1, 2, 1] = 0
    weights = (values * np.ldexp(rng.integers(1, 16, (2, 8, 3, 1)), -9)).reshape(2, 8, 48)
    kernel = quantize_groups(jnp.asarray(weights, dtype), 16)
    assert (kernel.values.dtype, kernel.scales.dtype, kernel.zero_points) == (jnp.int4, jnp.bfloat16, None)
    assert (kernel.scales.shape, kernel.scales_kind, kernel.shape) == ((2, 3, 8), "group", (2, 48, 8))
    np.testing.assert_array_equal(dequantize_groups(kernel, jnp.float32), weights)


def test_rounding_is_better_than_by_the_largest_number():
    """By a fifth of the squares, of normal numbers."""
    weights = np.random.default_rng(3).standard_normal((64, 256)).astype(np.float32)
    groups = weights.reshape(64, 2, 128)
    scales = np.abs(groups).max(axis=-1, keepdims=True) / 7
    plain = np.rint(groups / scales) * scales
    found = dequantize_groups(quantize_groups(jnp.asarray(weights), 128), jnp.float32)
    assert np.sum((found - weights) ** 2) < 0.8 * np.sum((plain - groups) ** 2)


def test_group_that_is_not_finite_becomes_nan_and_no_other_does():
    weights = jnp.ones((2, 32)).at[0, 3].set(jnp.nan).at[1, 20].set(jnp.inf)
    found = np.asarray(dequantize_groups(quantize_groups(weights, 16), jnp.float32))
    np.testing.assert_array_equal(np.isnan(found), np.kron([[1, 0], [0, 1]], np.ones((1, 16))).astype(bool))


def test_next_to_nothing_becomes_zeros():
    kernel = quantize_groups(jnp.asarray([[1e-38, 1.0, -1e-36, 0.0]]), 2)
    np.testing.assert_array_equal(dequantize_groups(kernel, jnp.float32), [[0, 1, 0, 0]])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"x": jnp.ones((2, 24))}, r"`x` must be one of .* last axis of its values. Got .*x.shape=\(2, 24\)"),
        ({"values": jnp.ones((24, 48), jnp.int8)}, "or int4 values and scales of one of float32, .*values.dtype=int8"),
        ({"scales": jnp.ones((3, 24), jnp.int8)}, "or int4 values and scales of one of float32, .*scales.dtype=int8"),
        ({"scales": jnp.ones((1, 1)), "zero_points": None}, "scales \\[G, F\\], .* where G divides D"),
        ({"scales": jnp.ones((5, 24)), "zero_points": None}, "G divides D"),
        ({"zero_points": jnp.ones((24, 3), jnp.int4)}, "zero points, one for each scale. Got .*zero_points.dtype=int4"),
        ({"zero_points": jnp.ones((24, 1), jnp.int8)}, r"Got .*zero_points.shape=\(24, 1\)"),
        ({"values": jnp.ones((24, 48), jnp.float8_e4m3fn)}, "no zero points, or int4 values.*values.dtype=float8_e4m3"),
        ({"layer_index": 0}, r"\[L, F, D\] and `layer_index` given"),
    ],
)
def test_bad_arguments_get_a_sentence(changes, match):
    x, kernel = operands(2)
    given = {"x": x, "layer_index": None} | vars(kernel) | changes
    x, layer_index = given.pop("x"), given.pop("layer_index")
    with pytest.raises(ValueError, match=match):
        inspect.unwrap(matmul)(x, QuantizedKernel(**given), layer_index=layer_index)


@pytest.mark.parametrize(
    ("kernel", "group_size", "match"),
    [
        (jnp.ones((4, 32)), 12, "`group_size` must divide the depth of `kernel`. Got group_size=12"),
        (jnp.ones((4, 32)), 0, "`group_size` must be a whole number of at least 1"),
        (jnp.ones((4, 32), jnp.int32), 16, "`kernel` must be .* Got .*kernel.dtype=int32"),
        (jnp.ones(32), 16, r"`kernel` must be \[..., F, D\] .* Got kernel.shape=\(32,\)"),
    ],
)
def test_what_has_no_groups_is_not_rounded(kernel, group_size, match):
    with pytest.raises(ValueError, match=match):
        inspect.unwrap(quantize_groups)(kernel, group_size)


def test_implementations_that_take_no_int4_leave_it_to_xla(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    x, kernel = operands(2)
    with pytest.raises(
        NotImplementedError, match=r"`mosaic` takes .* of int4 weights, not 2 rows .* Use implementation='xla'"
    ):
        matmul(x, kernel, implementation="mosaic")


def test_experts_in_int4_are_refused():
    kernels = {
        name: QuantizedKernel(values=jnp.zeros((2, *shape), jnp.int4), scales=jnp.ones((2, 1, shape[0])))
        for name, shape in {"gate_up": (32, 16), "down": (16, 16)}.items()
    }
    choice = {"weights": jnp.ones((3, 1)), "chosen": jnp.zeros((3, 1), jnp.int32)}
    with pytest.raises(ValueError, match=r"`gate_up` must .*fp8.* scale for each output, .*Got .*values.dtype=int4"):
        mixture_of_experts(jnp.ones((3, 16)), **choice, **kernels, activation=lambda gate, up: gate * up)


def test_derivative_is_refused():
    x, kernel = operands(2, dtype="float32")
    with pytest.raises(NotImplementedError, match="quantised weights has no derivative"):
        jax.grad(lambda x: jnp.sum(matmul(x, kernel)))(x)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "out_dtype"), [(1, "float32"), (1, "bfloat16"), (64, "bfloat16"), (2048, "bfloat16")])
def test_product_on_a_gpu_reads_one_layer(rows, out_dtype):
    """And is the oracle's, with each weight rounded to bfloat16."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, 2048)), jnp.bfloat16)
    stack = jax.jit(functools.partial(quantize_groups, group_size=128))(
        jnp.asarray(rng.standard_normal((3, 1000, 2048)), jnp.bfloat16)
    )
    product = functools.partial(matmul, implementation="xla", out_dtype=out_dtype)
    compiled = jax.jit(lambda *arrays: product(*arrays[:2], layer_index=arrays[2])).lower(x, stack, jnp.int32(1))
    compiled = compiled.compile()
    assert not re.search(r"(bf16|f16|f32|s8)\[3,1000,2048\]", compiled.as_text() or "")
    found = np.asarray(compiled(x, stack, jnp.int32(1)), np.float64)
    weights = reference.dequantized(stack.values[1], stack.scales[1])
    expected = reference.matmul(x, stack.values[1], stack.scales[1])
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(weights).T
    assert np.all(np.abs(found - expected) <= 2.0**-8 * np.abs(expected) + (2.0**-9 + 1e-5) * size)
