"""Products with weights against NumPy, their kernel under the interpreter, lowered for CUDA, and on a GPU."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import Routing, Unnormed, added, matmul, matmul_splits, routed_experts, taken
from jattn_kernels.call import Device
from tests.kernels.harness.copy_places import misplaced_copies
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.products import assert_product_of_normed, of_last_layer, operands, unnormed
from tests.kernels.harness.splits import splits_of
from tests.often import slow


def assert_product(out, x, kernel):
    """`out` is x @ kernel, to its own last place and what a sum in float32 loses."""
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    unit = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(kernel, np.float64))
    tolerance = float(jnp.finfo(out.dtype).eps) * np.abs(expected) + 1e-6 * unit
    assert np.all(np.abs(np.asarray(out, np.float64) - expected) <= tolerance)


@pytest.mark.parametrize(
    ("rows", "dtype", "out_dtype"),
    [(1, "bfloat16", None), (3, "bfloat16", "float32"), (9, "float16", None), (2, "float32", None)],
)
def test_product_with_a_layer_of_the_stack(rows, dtype, out_dtype):
    x, kernel = operands(rows, 40, 24, dtype=dtype)
    out = of_last_layer(matmul, out_dtype=out_dtype)(x, kernel, jnp.int32(1))
    assert out.dtype == (out_dtype or dtype)
    assert_product(out, x, kernel[1])
    np.testing.assert_array_equal(out, matmul(x, kernel[1], out_dtype=out_dtype))
    np.testing.assert_array_equal(out, matmul_splits(x, kernel[1], out_dtype=out_dtype))


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "multiplied"),
    [(1, 2048, 2048, 8), (1, 3072, 3072, 8), (1, 2400, 4096, 8), (1, 2448, 4096, 1), (2, 2048, 2048, 2)],
)
def test_xla_is_given_no_product_that_it_makes_a_sum_of(rows, depth, columns, multiplied):
    """One row, as of a model's first decode, with weights of a small model or of one device's share."""
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, depth), (depth, columns)))
    text = jax.jit(lambda x, kernel: matmul(x, kernel, implementation="xla")).lower(x, kernel).as_text()
    (product,) = (line for line in text.splitlines() if "dot_general" in line)
    assert f"-> tensor<{multiplied}x{columns}xbf16>" in product


def test_rows_may_have_any_axes():
    x, kernel = operands(6, 8, 16, layers=1, dtype="float32")
    np.testing.assert_array_equal(matmul(x.reshape(2, 3, 8), kernel[0]), matmul(x, kernel[0]).reshape(2, 3, 16))


def test_product_has_the_gradient_of_its_formula():
    x, kernel = operands(2, 8, 16, layers=1, dtype="float32")
    got = jax.grad(lambda x, k: jnp.sum(jnp.sin(matmul(x, k, layer_index=0))), argnums=(0, 1))(x, kernel)
    expected = jax.grad(lambda x, k: jnp.sum(jnp.sin(x @ k[0])), argnums=(0, 1))(x, kernel)
    for actual, exact in zip(got, expected, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-5)


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU, of few SMs so that each has several work tiles."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 3))


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "dtype"),
    [(1, 512, 128, "bfloat16"), (8, 320, 64, "float16"), (3, 64, 192, "bfloat16"), (2, 192, 96, "bfloat16")],
)
def test_kernel_without_races(hopper, rows, depth, columns, dtype):
    x, kernel = operands(rows, depth, columns, dtype=dtype)
    with interpreted():
        splits = of_last_layer(matmul_splits, implementation="mosaic", out_dtype="float32")(x, kernel, jnp.int32(1))
    assert (splits.shape, splits.dtype) == ((rows, columns), jnp.float32)
    assert_product(added(splits), x, kernel[1])
    np.testing.assert_array_equal(splits.parts[:, rows:], 0)


def biased_operands(rows, depth, columns, **facts):
    """Operands, and biases of the layers: NaN in all but the last."""
    x, kernel = operands(rows, depth, columns, **facts)
    bias = jnp.asarray(np.random.default_rng(3).standard_normal((len(kernel), columns)) * 30, x.dtype)
    return x, kernel, bias.at[:-1].set(jnp.nan)


def assert_biased_product(out, x, kernel, bias):
    with_bias = np.concatenate([np.asarray(kernel, np.float64), np.asarray(bias, np.float64)[None]])
    ones = np.ones((len(x), 1))
    assert_product(out, np.concatenate([np.asarray(x, np.float64), ones], axis=1), with_bias)


@pytest.mark.parametrize(("rows", "depth", "columns"), [slow(1, 320, 32), (3, 512, 64)])
def test_kernel_adds_a_bias_once_without_races(hopper, rows, depth, columns):
    x, kernel, bias = biased_operands(rows, depth, columns)
    with interpreted():
        splits = of_last_layer(matmul_splits, implementation="mosaic", out_dtype="float32", bias=bias)(
            x, kernel, jnp.int32(1)
        )
    assert len(splits.parts) > 1
    assert_biased_product(added(splits), x, kernel[1], bias[1])
    np.testing.assert_array_equal(splits.parts[:, rows:], 0)


@pytest.mark.parametrize(("rows", "dtype"), [(2, "float32"), (9, "bfloat16")])
def test_bias_is_added_after_a_product_of_xla(rows, dtype):
    x, kernel, bias = biased_operands(rows, 64, 40, dtype=dtype)
    out = of_last_layer(matmul_splits, bias=bias)(x, kernel, jnp.int32(1))
    np.testing.assert_array_equal(out, matmul(x, kernel[1]) + bias[1][None])
    np.testing.assert_array_equal(out, matmul_splits(x, kernel[1], bias=bias[1]))


def test_sums_that_nobody_added_up_have_no_derivative(hopper):
    x, kernel = operands(2, 256, 64)

    def loss(x):
        return added(matmul_splits(x, kernel[1], implementation="mosaic")).astype(jnp.float32).sum()

    with interpreted(), pytest.raises(NotImplementedError, match="Use `matmul`, or implementation='xla'"):
        jax.grad(loss)(x)


def test_kernel_rounds_once(hopper):
    x, kernel = operands(2, 256, 64)
    with interpreted():
        out = of_last_layer(matmul, implementation="mosaic")(x, kernel, jnp.int32(1))
        wide = of_last_layer(matmul, implementation="mosaic", out_dtype="float32")(x, kernel, jnp.int32(1))
        splits = of_last_layer(matmul_splits, implementation="mosaic")(x, kernel, jnp.int32(1))
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))
    np.testing.assert_array_equal(out, added(splits))


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "dtype"),
    [(1, 512, 128, "bfloat16"), (8, 384, 64, "float16"), slow(3, 128, 192, "bfloat16"), slow(2, 192, 64, "bfloat16")],
)
def test_kernel_norms_rows_without_races(hopper, rows, depth, columns, dtype):
    x, kernel = operands(rows, depth, columns, dtype=dtype)
    x = unnormed(x)
    with interpreted():
        out = of_last_layer(matmul_splits, implementation="mosaic", out_dtype="float32")(x, kernel, jnp.int32(1))
    assert_product_of_normed(out, x, kernel[1])


@pytest.mark.parametrize(("rows", "depth", "columns"), [(9, 64, 64), (2, 192, 40), (1, 8192, 64)])
def test_rows_that_the_kernel_does_not_norm_are_normed_before(hopper, rows, depth, columns):
    x, kernel = operands(rows, depth, columns, layers=1)
    x = unnormed(x)
    out = matmul_splits(x, kernel[0], implementation="xla")
    np.testing.assert_array_equal(out, matmul_splits(taken(x, implementation="xla"), kernel[0], implementation="xla"))


@pytest.mark.parametrize("implementation", ["mosaic", slow("xla")])
def test_experts_take_logits_in_splits(hopper, implementation):
    x, kernel = operands(3, 64, 32)
    rng = np.random.default_rng(1)
    gate_up, down = (jnp.asarray(rng.standard_normal(shape), x.dtype) for shape in ((32, 64, 128), (32, 64, 64)))
    splits = splits_of(matmul(x, kernel[1], implementation="xla", out_dtype="float32"))
    routing = Routing(num_experts=32, per_token=2)

    def mixed(logits):
        with interpreted():
            return jax.jit(
                lambda logits: routed_experts(x, logits, routing, gate_up, down, implementation=implementation)
            )(logits)

    np.testing.assert_array_equal(mixed(splits), mixed(added(splits)))


@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 2048, 5120), (8, 4096, 2048), (5, 2048, 128), (1, 2880, 32)]
)
def test_kernel_lowers_for_cuda(hopper, rows, depth, columns):
    shapes = ((rows, depth), "bfloat16"), ((4, depth, columns), "bfloat16"), ((), "int32")
    traced = of_last_layer(matmul).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 2048, 5120), (8, 4096, 2048), (1, 2880, 4096)])
def test_kernel_that_norms_lowers_for_cuda(hopper, rows, depth, columns):
    kernel = jax.ShapeDtypeStruct((4, depth, columns), "bfloat16")
    x = Unnormed(
        rows=jnp.ones((rows, depth), "bfloat16"), scale=jnp.ones((2, depth), "bfloat16"), layer_index=1, eps=0.0
    )
    traced = jax.jit(
        lambda rows, kernel: matmul_splits(dataclasses.replace(x, rows=rows), kernel, layer_index=1)
    ).trace(x.rows, kernel)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


def test_kernel_with_norm_and_bias_lowers_for_cuda(hopper):
    """gpt-oss-20b's queries, keys and values."""
    rows, scale = (jax.ShapeDtypeStruct((count, 2880), "bfloat16") for count in (1, 24))
    kernel, bias = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((24, 2880, 4160), (24, 4160)))

    def product(rows, scale, kernel, bias, layer):
        x = Unnormed(rows=rows, scale=scale, layer_index=layer, eps=1e-5)
        return matmul_splits(x, kernel, bias=bias, layer_index=layer)

    traced = jax.jit(product).trace(rows, scale, kernel, bias, jax.ShapeDtypeStruct((), "int32"))
    assert misplaced_copies(traced.jaxpr.jaxpr) == (3, [])
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "dtype"),
    [(9, 64, 64, "bfloat16"), (1, 72, 64, "bfloat16"), (1, 64, 72, "bfloat16"), (1, 64, 64, "float32")],
)
def test_what_the_kernel_does_not_take_is_refused_and_done_by_xla(hopper, rows, depth, columns, dtype):
    x, kernel = operands(rows, depth, columns, layers=1, dtype=dtype)
    assert_product(matmul(x, kernel[0], implementation="xla"), x, kernel[0])
    with pytest.raises(NotImplementedError, match=r"1 to 8 rows|does not take float32"):
        matmul(x, kernel[0], implementation="mosaic")


def test_large_weights_are_left_to_cublas(hopper):
    x, kernel = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((1, 4096), (4096, 4096)))
    text = jax.jit(matmul).trace(x, kernel).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" not in text


@pytest.mark.parametrize(
    ("kernel", "given", "match"),
    [
        (jnp.ones((39, 8)), {}, "`x` must have a column"),
        (jnp.ones((2, 40, 8)), {}, "`layer_index` given"),
        (jnp.ones((40, 8)), {"layer_index": 0}, "`kernel` must be"),
        (jnp.ones((2, 40, 8)), {"layer_index": 2}, "`layer_index`"),
        (jnp.ones((40, 8)), {"out_dtype": "int32"}, "`out_dtype`"),
        (jnp.ones((40, 8), jnp.int32), {}, "`x` and `kernel` must have one dtype"),
        ([1.0] * 40, {}, "`kernel`"),
    ],
)
def test_bad_arguments_get_a_sentence(kernel, given, match):
    with pytest.raises(ValueError, match=match):
        inspect.unwrap(matmul)(jnp.ones((2, 40)), kernel, **given)


@pytest.mark.parametrize(
    ("bias", "given"), [(jnp.ones(9), {}), (jnp.ones((2, 8)), {}), (jnp.ones(8), {"layer_index": 0}), ([1.0] * 8, {})]
)
def test_a_bias_that_does_not_fit_gets_a_sentence(bias, given):
    kernel = jnp.ones((2, 40, 8)) if given else jnp.ones((40, 8))
    with pytest.raises(ValueError, match="`bias`"):
        inspect.unwrap(matmul_splits)(jnp.ones((2, 40)), kernel, bias=bias, **given)


def test_splits_are_of_a_matrix():
    with pytest.raises(ValueError, match="`x` must be"):
        inspect.unwrap(matmul_splits)(jnp.ones((1, 2, 40)), jnp.ones((40, 8)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(
    ("depth", "columns", "dtype"),
    [(2048, 5120, "bfloat16"), (4096, 2048, "float16"), (320, 64, "bfloat16"), (2880, 32, "bfloat16")],
)
def test_kernel_on_a_gpu(rows, depth, columns, dtype):
    x, kernel = operands(rows, depth, columns, dtype=dtype)
    assert_product(of_last_layer(matmul, implementation="mosaic")(x, kernel, jnp.int32(1)), x, kernel[1])
    splits = of_last_layer(matmul_splits, implementation="mosaic")(x, kernel, jnp.int32(1))
    assert_product(added(splits), x, kernel[1])
    np.testing.assert_array_equal(splits.parts[:, rows:], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("depth", "columns"), [(2880, 32), (2880, 4096), (4096, 2880)])
def test_kernel_adds_a_bias_on_a_gpu(rows, depth, columns):
    x, kernel, bias = biased_operands(rows, depth, columns)
    product = of_last_layer(matmul_splits, implementation="mosaic", out_dtype="float32", bias=bias)
    splits = product(x, kernel, jnp.int32(1))
    assert_biased_product(added(splits), x, kernel[1], bias[1])
    np.testing.assert_array_equal(splits.parts[:, rows:], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    ("depth", "columns", "dtype"), [(2048, 5120, "bfloat16"), (4096, 2048, "float16"), (2880, 4096, "bfloat16")]
)
def test_kernel_norms_rows_on_a_gpu(rows, depth, columns, dtype):
    x, kernel = operands(rows, depth, columns, dtype=dtype)
    x = unnormed(x)
    product = of_last_layer(matmul_splits, implementation="mosaic", out_dtype="float32")
    assert_product_of_normed(product(x, kernel, jnp.int32(1)), x, kernel[1])


def test_bias_of_a_layer_is_kept_from_the_product():
    """XLA would have cuBLAS add it, and copy the layer's weights for that."""
    x, kernel, bias = jnp.ones((64, 128)), jnp.ones((2, 128, 64)), jnp.arange(128.0).reshape(2, 64)
    run = jax.jit(lambda layer: matmul_splits(x, kernel, bias=bias, layer_index=layer, implementation="xla"))
    np.testing.assert_array_equal(run(1), 128 + jnp.broadcast_to(bias[1], (64, 64)))
    text = run.lower(1).as_text()
    (kept,) = re.findall(r"(%\S+) = stablehlo.optimization_barrier", text)
    assert f"stablehlo.add {kept}," in text
