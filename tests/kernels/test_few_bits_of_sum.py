"""One row that is added up and normed before its product with weights in few bits, in one kernel."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import (
    QuantizedKernel,
    Splits,
    Unnormed,
    added,
    matmul_gated,
    matmul_gated_of_sum,
    matmul_splits,
    matmul_splits_of_sum,
    rms_norm,
)
from jattn_kernels.call import Device
from tests.kernels import test_fp8_kernel as of_fp8
from tests.kernels import test_int4_kernel as of_int4
from tests.kernels.harness.copy_places import misplaced_copies
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.products import unnormed
from tests.kernels.harness.splits import splits_of
from tests.often import slow


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU, of few SMs so that each has several work tiles."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 3))


def to_be_summed(x, count):
    """Rows, and so many additions in splits; whose sum, and its norm."""
    more = jax.random.normal(jax.random.key(1), (count, *x.shape))
    additions = tuple(dataclasses.replace(splits_of(each), dtype=x.dtype) for each in more)
    given = dataclasses.replace(unnormed(x), additions=additions)
    total = x
    for addition in additions:
        total = total + added(addition)
    return given, total


def assert_summed(summed, total, given):
    """But for the last place where splits that are added in another order are between two numbers."""
    sizes = sum(np.abs(np.asarray(added(addition), np.float64)) for addition in given.additions)
    summed, total = (np.asarray(rows, np.float64) for rows in (summed, total))
    last_place = float(jnp.finfo(given.rows.dtype).eps) * (sizes + np.abs(total))
    assert np.all(np.abs(summed - total) <= last_place)
    assert np.mean(summed != total) < 0.01


def assert_normed(normed, total, given):
    """But for the last place."""
    whole = np.asarray(rms_norm(total, given.scale[-1], eps=1e-5, offset=0.5, implementation="xla"), np.float64)
    np.testing.assert_allclose(np.asarray(normed, np.float64), whole, rtol=float(jnp.finfo(total.dtype).eps), atol=0)


def assert_int4(depth, columns, group_size, count, options):
    x, kernel = of_int4.operands(1, depth, columns, group_size, **options)
    given, total = to_be_summed(x, count)

    def product(given, kernel):
        return matmul_splits_of_sum(given, kernel, layer_index=1, out_dtype="float32", implementation="mosaic")

    out, summed, normed = jax.jit(product)(given, kernel)
    assert_summed(summed, total, given)
    assert_normed(normed, summed, given)
    of_int4.assert_product(added(out), normed, kernel)
    if isinstance(out, Splits):
        np.testing.assert_array_equal(out.parts[:, 1:], 0)


def assert_gated(depth, columns, count, options):
    """The activation is that of the product by itself, of the norm that is returned."""
    x, kernel = of_int4.operands(1, depth, columns, 128, **options)
    kernel = dataclasses.replace(kernel, scales=kernel.scales / depth**0.5)
    given, total = to_be_summed(x, count)
    options = {"layer_index": 1, "implementation": "mosaic"}

    @jax.jit
    def product(given, kernel):
        gated, summed, normed = matmul_gated_of_sum(given, kernel, of_int4.silu_gate, **options)
        return gated, summed, normed, matmul_gated(normed, kernel, of_int4.silu_gate, **options)

    gated, summed, normed, alone = product(given, kernel)
    assert gated.shape == (1, columns // 2)
    assert_summed(summed, total, given)
    assert_normed(normed, summed, given)
    np.testing.assert_array_equal(np.asarray(gated, np.float32), np.asarray(alone, np.float32))


def assert_fp8(depth, columns, count, dtype, lost):
    x, kernel = of_fp8.operands(1, depth, columns, dtype=dtype)
    given, total = to_be_summed(x, count)

    def product(given, kernel):
        return matmul_splits_of_sum(given, kernel, layer_index=1, out_dtype="float32", implementation="mosaic")

    out, summed, normed = jax.jit(product)(given, kernel)
    assert_summed(summed, total, given)
    assert_normed(normed, summed, given)
    of_fp8.assert_product(added(out), normed, kernel, lost, ties=True)
    np.testing.assert_array_equal(out.parts[:, 1:], 0)


@pytest.mark.parametrize(
    ("depth", "columns", "group_size", "count", "options"),
    [
        slow(1024, 64, 128, 1, {}),
        (2048, 128, 32, 2, {"dtype": "float16", "zero_points": True}),  # two of four consumers share the row
        (1024, 256, 64, 1, {}),  # one has all of it
        slow(4096, 256, 64, 2, {}),  # four
    ],
)
def test_int4_product_of_a_sum_without_races(hopper, depth, columns, group_size, count, options):
    with interpreted():
        assert_int4(depth, columns, group_size, count, options)


@pytest.mark.parametrize(("depth", "columns", "count", "options"), [(1024, 1344, 1, {}), slow(2048, 576, 2, {})])
def test_gated_product_of_a_sum_without_races(hopper, depth, columns, count, options):
    with interpreted():
        assert_gated(depth, columns, count, options)


def test_a_gate_is_left_to_who_reads_it_where_no_kernel_takes_it_with_the_norm(hopper):
    x, kernel = of_int4.operands(1, 1024, 448, 128)
    given, total = to_be_summed(x, 1)
    with interpreted():
        ungated, summed, _ = matmul_gated_of_sum(given, kernel, of_int4.silu_gate, layer_index=1)
    assert ungated.shape == (1, 224)
    assert_summed(summed, total, given)


def test_a_gated_product_of_what_is_no_sum_gets_a_sentence(hopper):
    x, kernel = of_int4.operands(1, 1024, 448, 128)
    with pytest.raises(ValueError, match="must be Unnormed, with some `additions`"):
        matmul_gated_of_sum(unnormed(x), kernel, of_int4.silu_gate, layer_index=1)


@pytest.mark.parametrize(
    ("depth", "columns", "count", "dtype"), [(1024, 128, 2, "bfloat16"), slow(3072, 64, 1, "float16")]
)
def test_fp8_product_of_a_sum_without_races(hopper, depth, columns, count, dtype):
    with interpreted():
        assert_fp8(depth, columns, count, dtype, of_fp8.SUMS_IN_F32)


@pytest.mark.parametrize("in_fp8", [True, False])
@pytest.mark.parametrize(("depth", "columns"), [(4096, 6144), (4096, 28672), (1024, 1024)])
def test_product_of_a_sum_lowers_for_cuda(monkeypatch, depth, columns, in_fp8):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    rows, scale = (jax.ShapeDtypeStruct((count, depth), "bfloat16") for count in (1, 24))
    parts = [jax.ShapeDtypeStruct((8, 4, depth), "float32")] * 2
    of_scales, dtype = ((2, columns, 1), "float32") if in_fp8 else ((2, depth // 128, columns), "bfloat16")
    kernel: Any = QuantizedKernel
    values = jax.ShapeDtypeStruct((2, columns, depth), "float8_e4m3fn" if in_fp8 else "int4")
    kernel = kernel(values=values, scales=jax.ShapeDtypeStruct(of_scales, dtype), interleaved=not in_fp8)

    def product(rows, parts, scale, kernel, layer):
        additions = tuple(Splits(parts=part, num_rows=1, dtype=rows.dtype) for part in parts)
        x = Unnormed(rows=rows, additions=additions, scale=scale, layer_index=layer, eps=1e-5)
        return matmul_splits_of_sum(x, kernel, layer_index=layer)

    traced = jax.jit(product).trace(rows, parts, scale, kernel, jax.ShapeDtypeStruct((), "int32"))
    assert misplaced_copies(traced.jaxpr.jaxpr) == (1 if in_fp8 else 2, [])
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("depth", [slow(4096 + 1024), 1024 + 128])
def test_rows_too_long_or_uneven_are_summed_before(hopper, depth):
    x, kernel = of_int4.operands(1, depth, 64, 128)
    given, total = to_be_summed(x, 1)
    with interpreted():
        out = matmul_splits(given, kernel, layer_index=1, out_dtype="float32", implementation="mosaic")
    normed = rms_norm(total, given.scale, eps=1e-5, offset=0.5, layer_index=2, implementation="xla")
    of_int4.assert_product(added(out), normed, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "columns"), [(4096, 6144), (4096, 28672), (4096, 64), (2048, 1152)])
@pytest.mark.parametrize("count", [1, 2])
def test_product_of_a_sum_on_a_gpu(depth, columns, count):
    assert_int4(depth, columns, 128, count, {})
    assert_int4(depth, columns, 32, count, {"dtype": "float16"})
    for dtype in ("bfloat16", "float16"):
        assert_fp8(depth, columns, count, dtype, 2.0**-9)


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "columns"), [(4096, 28672), (2048, 16384)])
@pytest.mark.parametrize("count", [1, 2])
def test_gated_product_of_a_sum_on_a_gpu(depth, columns, count):
    assert_gated(depth, columns, count, {})
    assert_gated(depth, columns, count, {"dtype": "float16"})
