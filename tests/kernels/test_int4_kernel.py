"""Hopper's product with weights in int4: under the interpreter against the oracle, lowered for CUDA, and on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import QuantizedKernel, added, interleave, matmul, matmul_gated, matmul_splits, reference
from jattn_kernels.call import Device
from jattn_kernels.interleaved import in_turn
from jattn_kernels.ungated import Ungated
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.products import of_last_layer
from tests.often import often_together, slow


def operands(
    rows,
    depth,
    columns,
    group_size,
    *,
    zero_points=False,
    layers=2,
    dtype="bfloat16",
    scales="bfloat16",
    is_interleaved=True,
):
    """Rows, and the weights of some layers: NaN scales in all but the last."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, depth)), dtype)
    shape = (layers, depth // group_size, columns)
    factors = np.exp(rng.standard_normal(shape)) * rng.choice([-1, 1], shape)
    factors[:-1] = np.nan
    far = [] if dtype == "float16" else [-128, 120]  # products would be larger than float16 is
    kernel = QuantizedKernel(
        values=jnp.asarray(rng.integers(-8, 8, (layers, columns, depth)), jnp.int4),
        scales=jnp.asarray(factors, scales),
        zero_points=jnp.asarray(rng.choice([*range(-8, 9), *far], shape), jnp.int8) if zero_points else None,
    )
    return x, interleave(kernel) if is_interleaved else kernel


def assert_product(out, x, kernel):
    """`out` is the oracle's of the last layer, to its own last place and what a sum in float32 loses."""
    last = jax.tree.map(lambda leaf: leaf[-1], kernel)
    values = in_turn(last.values) if last.interleaved else last.values
    expected = reference.matmul(x, values, last.scales, last.zero_points)
    weights = reference.matmul(jnp.eye(x.shape[1], dtype=jnp.float32), values, last.scales, last.zero_points)
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(weights)
    tolerance = float(jnp.finfo(out.dtype).eps) * np.abs(expected) + 2e-6 * size
    assert np.all(np.abs(np.asarray(out, np.float64) - expected) <= tolerance)


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU, of few SMs so that each has several work tiles."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 4))


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "group_size", "options"),
    [
        slow(1, 512, 128, 128, {}),
        (1, 1024, 128, 32, {}),  # a row that is in shared memory all the time
        slow(1, 1024, 64, 64, {"is_interleaved": False}),
        (24, 1024, 256, 128, {}),  # consumers take turns
        (40, 640, 448, 128, {"is_interleaved": False}),
        (2, 1024, 320, 128, {}),  # blocks have even shares, five blocks of columns
        (3, 256, 64, 32, {"dtype": "float16", "zero_points": True}),
        (1, 1024, 128, 128, {"zero_points": True}),
        (20, 512, 320, 128, {"zero_points": True}),
        slow(20, 256, 192, 64, {"scales": "float32"}),
        (140, 128, 128, 128, {}),  # two blocks of rows
        (8, 384, 64, 384, {"scales": "float16"}),  # a scale for each output
    ],
)
def test_kernel_without_races(hopper, rows, depth, columns, group_size, options):
    x, kernel = operands(rows, depth, columns, group_size, **options)
    with interpreted():
        out = of_last_layer(matmul, implementation="mosaic")(x, kernel, jnp.int32(1))
    assert out.dtype == x.dtype
    assert_product(out, x, kernel)


def silu_gate(gate, up):
    return jax.nn.silu(gate) * up


def assert_gated(rows, depth, columns, options):
    """The activation is that of the oracle's product, whose halves are rounded before it."""
    x, kernel = operands(rows, depth, columns, 128, **options)
    x = x / depth**0.5
    if kernel.zero_points is not None:  # not so far away that one half's sums are all the other's
        kernel = dataclasses.replace(kernel, zero_points=jnp.clip(kernel.zero_points, -8, 8))

    def gated_product(x, kernel):
        return matmul_gated(x, kernel, silu_gate, layer_index=1, implementation="mosaic")

    out = jax.jit(gated_product)(x, kernel)
    assert out.dtype == x.dtype
    last = jax.tree.map(lambda leaf: leaf[-1], kernel)
    values = in_turn(last.values) if last.interleaved else last.values
    gate, up = np.split(reference.matmul(x, values, last.scales, last.zero_points), 2, axis=1)
    exact = gate / (1 + np.exp(-gate)) * up
    tolerance = float(jnp.finfo(x.dtype).eps) * (1.2 * np.abs(gate * up) + 2 * np.abs(exact) + 1e-3)
    assert np.all(np.abs(np.asarray(out, np.float64) - exact) <= tolerance)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "options"),
    [
        (60, 512, 448, {}),  # of both halves' 112 columns two strips share 16; 256 inputs a stage
        (64, 384, 128, {"dtype": "float16", "zero_points": True}),  # a strip of each
        slow(64, 128, 1280, {"is_interleaved": False}),  # two work tiles a block
        (1, 1024, 896, {"zero_points": True}),  # a row that is in shared memory all the time, a work tile a block
        slow(1, 1024, 1024, {"dtype": "float16"}),
    ],
)
def test_gated_product_without_races(hopper, rows, depth, columns, options):
    with interpreted():
        assert_gated(rows, depth, columns, options)


@pytest.mark.parametrize(("rows", "depth"), [slow(56, 256), slow(65, 256), (1, 1024), (1, 512)])
def test_other_rows_are_activated_by_who_reads_them(hopper, rows, depth):
    """Of one row those whose work tiles do not come out even, and those that are too short to be shared."""
    x, kernel = operands(rows, depth, 448, 128)
    with interpreted():
        ungated = matmul_gated(x, kernel, silu_gate, layer_index=1)
    assert isinstance(ungated, Ungated)
    assert ungated.shape == (rows, 224)


def test_splits_add_up_to_the_product(hopper):
    x, kernel = operands(3, 512, 64, 128)
    with interpreted():
        splits = of_last_layer(matmul_splits, implementation="mosaic", out_dtype="float32")(x, kernel, jnp.int32(1))
    assert_product(added(splits), x, kernel)
    np.testing.assert_array_equal(splits.parts[:, 3:], 0)


# Each number of rows, each size.
LOWERED = [(1, 11008, 4096, 32), (16, 640, 64, 640), (64, 4096, 6144, 128), (256, 4096, 6144, 128)]


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "group_size"),
    often_together(
        [
            (rows, *sizes)
            for rows in (1, 16, 64, 256)
            for sizes in ((4096, 6144, 128), (11008, 4096, 32), (640, 64, 640))
        ],
        LOWERED,
    ),
)
def test_kernel_is_lowered_for_cuda(monkeypatch, rows, depth, columns, group_size):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    values = jax.ShapeDtypeStruct((2, columns, depth), jnp.int4)
    scales = jax.ShapeDtypeStruct((2, depth // group_size, columns), jnp.bfloat16)
    kernel = QuantizedKernel(values=values, scales=scales, interleaved=True)
    x = jax.ShapeDtypeStruct((rows, depth), jnp.bfloat16)
    traced = of_last_layer(matmul, implementation="mosaic").trace(x, kernel, jax.ShapeDtypeStruct((), jnp.int32))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "group_size", "match"),
    [
        (257, 256, 64, 128, "takes 1 to 256 rows"),
        (2, 192, 64, 64, "a multiple of 128 numbers"),
        (2, 256, 96, 128, "a multiple of 64 columns of int4 weights"),
        (2, 256, 64, 16, "in groups of 32, 64 or a multiple of 128 inputs, not 16"),
    ],
)
def test_what_is_not_served_gets_a_sentence(hopper, rows, depth, columns, group_size, match):
    x, kernel = operands(rows, depth, columns, group_size)
    with pytest.raises(NotImplementedError, match=match):
        matmul(x, kernel, layer_index=1, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 17, 64, 200])
@pytest.mark.parametrize(
    ("depth", "columns", "group_size", "options"),
    [
        (4096, 6144, 128, {}),
        (2048, 4096, 64, {"dtype": "float16", "zero_points": True}),
        (384, 320, 32, {"scales": "float32"}),
        (2048, 6144, 128, {"is_interleaved": False}),
        (4096, 28672, 128, {"zero_points": True}),
        (14336, 1024, 14336, {}),
    ],
)
def test_kernel_on_a_gpu(rows, depth, columns, group_size, options):
    x, kernel = operands(rows, depth, columns, group_size, **options)
    assert_product(of_last_layer(matmul, implementation="mosaic")(x, kernel, jnp.int32(1)), x, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [57, 64])
@pytest.mark.parametrize(("depth", "columns"), [(1024, 28672), (1024, 2560), (512, 3328)])
def test_gated_product_on_a_gpu(rows, depth, columns):
    assert_gated(rows, depth, columns, {})
    assert_gated(rows, depth, columns, {"zero_points": True})


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "columns"), [(4096, 28672), (1024, 16384), (3072, 24576)])
def test_gated_product_of_one_row_on_a_gpu(depth, columns):
    assert_gated(1, depth, columns, {})
    assert_gated(1, depth, columns, {"dtype": "float16", "zero_points": True})
