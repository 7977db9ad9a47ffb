"""Products of rows that are added up and normed first."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import Splits, Unnormed, added, matmul_splits, matmul_splits_of_sum, rms_norm, summed_and_normed
from jattn_kernels.call import Device
from tests.kernels.harness.copy_places import misplaced_copies
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.products import assert_product_of_normed, operands, unnormed
from tests.kernels.harness.splits import splits_of
from tests.often import slow


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU, of few SMs so that each has several work tiles."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 3))


def summed(x, additions):
    for addition in additions:
        x = x + added(addition)
    return x


@pytest.mark.parametrize(
    ("rows", "depth", "dtype", "implementation"),
    [
        slow(1, 1024, "bfloat16", "mosaic"),
        (1, 1088, "bfloat16", "mosaic"),  # half of a stage more
        slow(1, 1152, "float16", "mosaic"),
        (2, 1024, "bfloat16", "mosaic"),
        (1, 1024, "bfloat16", "xla"),
    ],
)
def test_rows_are_added_up_and_normed_before_their_product(hopper, rows, depth, dtype, implementation):
    with interpreted():
        check_product_of_sum(rows, depth, 64, dtype, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "columns"), [(2048, 5120), (2048, 128), (4096, 2048), (1152, 320), (2880, 32)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_are_added_up_and_normed_before_their_product_on_a_gpu(depth, columns, dtype):
    check_product_of_sum(1, depth, columns, dtype, "mosaic")


def check_product_of_sum(rows, depth, columns, dtype, implementation):
    x, kernel = operands(rows, depth, columns, dtype=dtype)
    more = jax.random.normal(jax.random.key(1), (2, rows, depth))
    additions = tuple(dataclasses.replace(splits_of(each), dtype=x.dtype) for each in more)
    given = dataclasses.replace(unnormed(x), additions=additions)
    facts = {"implementation": implementation, "layer_index": 1, "out_dtype": "float32"}
    out, total, normed = jax.jit(lambda x, kernel: matmul_splits_of_sum(x, kernel, **facts))(given, kernel)
    alone = jax.jit(lambda x, kernel: matmul_splits(x, kernel, **facts))(given, kernel)
    np.testing.assert_array_equal(total, summed(x, additions))
    expected = dataclasses.replace(given, rows=total, additions=())
    assert_product_of_normed(out, expected, kernel[1])
    np.testing.assert_array_equal(added(out), added(alone))
    whole = np.asarray(rms_norm(total, given.scale[-1], eps=1e-5, offset=0.5, implementation="xla"), np.float64)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(normed, np.float64), whole, rtol=eps, atol=0)


def test_what_adds_nothing_up_is_no_sum():
    x, kernel = operands(1, 64, 64)
    with pytest.raises(ValueError, match=r"with some `additions`\. Got none"):
        matmul_splits_of_sum(unnormed(x), kernel[1])


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"), [(3, 1024, "bfloat16"), (1, 1, "bfloat16"), (1, 1024, "float32")]
)
def test_what_is_added_is_like_the_rows(hopper, rows, columns, dtype):
    x, kernel = operands(1, 1024, 64)
    addition = Splits(parts=jnp.zeros((2, rows, columns)), num_rows=rows, dtype=jnp.dtype(dtype))
    given = dataclasses.replace(unnormed(x), additions=(addition,))
    for function in (lambda: matmul_splits_of_sum(given, kernel[1]), lambda: summed_and_normed(given)):
        with pytest.raises(ValueError, match=rf"of one dtype\. .* addition\.shape=\({rows}, {columns}\) of {dtype}\."):
            function()


@pytest.mark.parametrize("columns", [128, 5120])
def test_kernel_that_adds_up_lowers_for_cuda(hopper, columns):
    rows, scale = (jax.ShapeDtypeStruct((count, 2048), "bfloat16") for count in (1, 24))
    parts = [jax.ShapeDtypeStruct((count, rows, 2048), "float32") for count, rows in ((8, 1), (4, 4))]
    kernel = jax.ShapeDtypeStruct((24, 2048, columns), "bfloat16")

    def product(rows, parts, scale, kernel, layer):
        additions = tuple(Splits(parts=part, num_rows=1, dtype=rows.dtype) for part in parts)
        x = Unnormed(rows=rows, additions=additions, scale=scale, layer_index=layer, eps=1e-5)
        return matmul_splits_of_sum(x, kernel, layer_index=layer)

    traced = jax.jit(product).trace(rows, parts, scale, kernel, jax.ShapeDtypeStruct((), "int32"))
    assert misplaced_copies(traced.jaxpr.jaxpr) == (1, [])
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1
