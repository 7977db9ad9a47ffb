"""One token's MLP in int4 with the products around it, in one kernel: against the oracle, lowered, and on a GPU."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import NextProduct, QuantizedKernel, Splits, Unmultiplied, interleave, mlp_of_sum, reference
from jattn_kernels.call import Device
from jattn_kernels.interleaved import in_turn
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.products import unnormed
from tests.often import slow

LAYERS = 2


def silu_gate(gate, up):
    return jax.nn.silu(gate) * up


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU, of few SMs so that each has several units."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 3))


def weights(rng, columns, depth, group_size, scales="bfloat16", zero_points=False):
    """Of some layers: NaN scales in all but the last. Products are about as large as rows."""
    shape = (LAYERS, depth // group_size, columns)
    factors = np.exp(0.3 * rng.standard_normal(shape)) * rng.choice([-1, 1], shape) / (5 * depth**0.5)
    factors[:-1] = np.nan
    values = jnp.asarray(rng.integers(-8, 8, (LAYERS, columns, depth)), jnp.int4)
    taken = jnp.asarray(rng.integers(-3, 4, shape), jnp.int8) if zero_points else None
    return interleave(QuantizedKernel(values=values, scales=jnp.asarray(factors, scales), zero_points=taken))


def given(*, width, attended, units, columns, group_size=128, dtype="bfloat16", biased=False, rows_left=16, **options):
    """What a layer's MLP is of, and the next layer's product, if it has columns."""
    rng = np.random.default_rng(0)
    make = functools.partial(weights, rng, group_size=group_size, **options)
    x = unnormed(jnp.asarray(rng.standard_normal((1, width)), dtype))
    parts = jnp.zeros((1, rows_left, width), jnp.float32).at[:, 0].set(rng.standard_normal(width))
    left = Splits(parts=parts, num_rows=1, dtype=x.dtype)

    def bias(columns):
        return jnp.asarray(rng.standard_normal((LAYERS, columns)), dtype) if biased else None

    product = Unmultiplied(
        rows=jnp.asarray(rng.standard_normal((1, attended)), dtype),
        kernel=make(width, attended),
        layer_index=LAYERS - 1,
        bias=bias(width),
    )
    following = None
    if columns:
        following = NextProduct(
            scale=x.scale,
            scale_layer=x.layer_index,
            kernel=make(columns, width),
            layer_index=LAYERS - 1,
            bias=bias(columns),
            eps=1e-4,
            offset=0.25,
        )
    x = dataclasses.replace(x, additions=(left, product))
    return x, make(2 * units, width), make(width, units), following


def run(x, gate_up, down, following, **options):
    return mlp_of_sum(x, gate_up, down, silu_gate, following=following, layer_index=LAYERS - 1, **options)


def product(rows, kernel):
    """With the last layer's weights."""
    last = jax.tree.map(lambda leaf: leaf[-1], kernel)
    return reference.matmul(rows, in_turn(last.values), last.scales, last.zero_points)


def rounded(numbers, dtype):
    return np.asarray(jnp.asarray(numbers, jnp.float32).astype(dtype), np.float64)


def expected(x, gate_up, down, following):
    """The MLP's result, the sum, and the next product, each step rounded as it is said to be."""
    dtype, (left, last) = x.dtype, x.additions
    wide = functools.partial(np.asarray, dtype=np.float64)

    def normed(rows, scale, eps, offset):
        inverse = 1 / np.sqrt(np.mean(rows**2, axis=-1, keepdims=True) + eps)
        return rounded(rows * inverse * (wide(scale) + offset), dtype)

    def biased(rows, kernel, bias):
        return product(rows, kernel) + (0.0 if bias is None else wide(bias[-1]))

    total = rounded(wide(x.rows) + rounded(left.parts[:, 0].sum(axis=0)[None], dtype), dtype)
    attended = biased(wide(last.rows), last.kernel, last.bias)
    total = rounded(total + rounded(attended, dtype), dtype)
    halves = np.split(product(normed(total, x.scale[-1], x.eps, x.offset), gate_up), 2, axis=-1)
    hidden = rounded(halves[0] / (1 + np.exp(-halves[0])) * halves[1], dtype)
    addition = product(hidden, down)
    if following is None:
        return addition, total, None
    later = rounded(total + rounded(addition, dtype), dtype)
    rows = normed(later, following.scale[-1], following.eps, following.offset)
    return addition, total, biased(rows, following.kernel, following.bias)


def assert_of_sum(case: dict[str, Any]):
    """A number between two of the dtype may be rounded to either, which what follows then has a part of."""
    x, gate_up, down, following = operands = given(**case)
    addition, total, after = jax.jit(functools.partial(run, implementation="mosaic"))(*operands)
    sure, whole, next_ = expected(x, gate_up, down, following)
    eps = float(jnp.finfo(x.dtype).eps)
    np.testing.assert_allclose(np.asarray(total, np.float64), whole, rtol=2 * eps, atol=2 * eps)
    assert isinstance(addition, Splits)
    assert (after is None) == (following is None)
    for found, right in ((addition, sure), (after, next_))[: 1 if after is None else 2]:
        np.testing.assert_array_equal(found.parts[:, 1:], 0)
        numbers = np.asarray(found.parts[:, :1].sum(axis=0), np.float64)
        np.testing.assert_allclose(numbers, right, rtol=0, atol=4 * eps * np.sqrt(np.mean(right**2)))


@pytest.mark.parametrize(
    "case",
    [
        {"width": 1024, "attended": 1536, "units": 5120, "columns": 96},
        {
            "width": 1536,
            "attended": 1024,
            "units": 1024,
            "columns": 64,
            "biased": True,
            "group_size": 64,
            "zero_points": True,
        },
        {"width": 1024, "attended": 1024, "units": 1024, "columns": 0, "group_size": 32, "dtype": "float16"},
        slow({"width": 1024, "attended": 1536, "units": 1024, "columns": 64, "zero_points": True}),
    ],
)
def test_mlp_of_a_sum_without_races(hopper, case):
    with interpreted():
        assert_of_sum(case)


def is_one_kernel(operands):
    text = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("@mosaic_gpu_v2") == 1


# Of Llama-3-8B; Qwen2.5-7B, with zero points as AWQ has them; Qwen3-4B; Llama-3.2-1B, likewise.
SHAPES: list[dict[str, Any]] = [
    {"width": 4096, "attended": 4096, "units": 14336, "columns": 6144},
    {"width": 3584, "attended": 3584, "units": 18944, "columns": 4608, "biased": True, "zero_points": True},
    {"width": 2560, "attended": 4096, "units": 9728, "columns": 6144, "group_size": 64, "dtype": "float16"},
    {"width": 2048, "attended": 2048, "units": 8192, "columns": 3072, "group_size": 32, "scales": "float16"},
    {"width": 2048, "attended": 2048, "units": 8192, "columns": 3072, "group_size": 64, "zero_points": True},
]


@pytest.mark.parametrize("case", SHAPES[3:])
def test_it_is_one_kernel(monkeypatch, case):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    assert is_one_kernel(given(**case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES)
def test_mlp_of_a_sum_on_a_gpu(case):
    assert is_one_kernel(given(**case))
    assert_of_sum(case)
    operands, again = given(**case), jax.jit(run)
    made = again(*operands)
    for number in range(200):
        for found, first in zip(jax.tree.leaves(again(*operands)), jax.tree.leaves(made), strict=True):
            np.testing.assert_array_equal(found, first, f"run {number}")
