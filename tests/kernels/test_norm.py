"""The norm against NumPy, its kernel under the interpreter, lowered for CUDA, and on a GPU."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import add_rms_norm, added, rms_norm
from jattn_kernels.call import Device
from jattn_kernels.mosaic.sm90.common import shared_row
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.norm_rows import EPS, assert_norm, rows
from tests.kernels.harness.splits import splits_of


@pytest.mark.parametrize(("dtype", "offset"), [("float32", 0.0), ("bfloat16", 1.0)])
def test_norm_of_a_layer_of_the_stack(dtype, offset):
    x, scale = rows(2, 3, 40, dtype=dtype), rows(5, 40, dtype=dtype, key=1)
    out = jax.jit(lambda x, scale, layer: rms_norm(x, scale, eps=EPS, offset=offset, layer_index=layer))(
        x, scale, jnp.int32(3)
    )
    assert_norm(out, x, scale[3], offset)
    alone = jax.jit(lambda x, scale: rms_norm(x, scale, eps=EPS, offset=offset))(x, scale[3])
    np.testing.assert_array_equal(out, alone)


def test_norm_has_the_gradient_of_its_formula():
    x, scale = rows(2, 40), rows(40, key=1)

    def formula(x, scale):
        return jnp.sum(jnp.sin(x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * scale[None]))

    got = jax.grad(lambda x, scale: jnp.sum(jnp.sin(rms_norm(x, scale, eps=EPS))), argnums=(0, 1))(x, scale)
    for actual, expected in zip(got, jax.grad(formula, argnums=(0, 1))(x, scale), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))


@pytest.mark.parametrize("columns", [1024, 1088, 2880])
def test_kernel_without_races(hopper, columns):
    x, scale = rows(3, columns, dtype="bfloat16"), rows(2, columns, dtype="bfloat16", key=1)
    with interpreted():
        out = rms_norm(x, scale, eps=EPS, offset=1.0, layer_index=1, implementation="mosaic")
    assert_norm(out, x, scale[1], 1.0)


def assert_added(results, x, addition, scale):
    """Both are what a sum and a norm by themselves make, but for what a sum in another order loses."""
    total, normed = results
    tolerance = 2 * float(jnp.finfo(x.dtype).eps)
    sizes = np.abs(np.asarray(x, np.float32)) + np.abs(np.asarray(added(addition), np.float32))
    assert np.all(np.abs(np.asarray(total - (x + added(addition)), np.float32)) <= tolerance * sizes)
    assert_norm(normed, total, scale)


@pytest.mark.parametrize("in_splits", [False, True])
def test_norm_of_a_sum(in_splits):
    x, addition, scale = (rows(3, 1024, dtype="bfloat16", key=key) for key in range(3))
    addition = splits_of(addition) if in_splits else addition
    results = add_rms_norm(x, addition, scale, eps=EPS, layer_index=2)
    np.testing.assert_array_equal(results[0], x + added(addition))
    assert_added(results, x, addition, scale[2])


def rounded(splits):
    """As products of many rows leave them."""
    return dataclasses.replace(splits, parts=splits.parts.astype(splits.dtype))


@pytest.mark.parametrize(
    ("columns", "dtype", "form"),
    [
        (1024, "bfloat16", rounded),
        (1024, "float16", None),
        (2112, "bfloat16", None),
        (2048, "bfloat16", rounded),  # two warpgroups share a row
    ],
)
def test_kernel_adds_splits_without_races(hopper, columns, dtype, form, monkeypatch):
    monkeypatch.setattr(shared_row, "FEWEST_ROWS", 2)
    x, addition, scale = (rows(3, columns, dtype=dtype, key=key) for key in range(3))
    addition = splits_of(addition) if form is None else form(splits_of(addition))
    with interpreted():
        results = add_rms_norm(x, addition, scale, eps=EPS, layer_index=2, implementation="mosaic")
    assert_added(results, x, addition, scale[2])


def test_sums_that_the_kernel_does_not_norm_are_added_up_before(hopper):
    x, addition, scale = (rows(3, 1000, dtype="bfloat16", key=key) for key in range(3))
    addition = splits_of(addition)
    results = add_rms_norm(x, addition, scale, eps=EPS, layer_index=2, implementation="xla")
    assert_added(results, x, addition, scale[2])
    with pytest.raises(NotImplementedError, match="1,024 to 8,192"):
        add_rms_norm(x, addition, scale, eps=EPS, layer_index=2, implementation="mosaic")


@pytest.mark.parametrize("addition", [jnp.ones((3, 1024)), splits_of(jnp.ones((2, 1024), "bfloat16"))])
def test_a_sum_of_other_rows_gets_a_sentence(addition):
    x = rows(3, 1024, dtype="bfloat16")
    with pytest.raises(ValueError, match="`x` and `addition` must be"):
        inspect.unwrap(add_rms_norm)(x, addition, x[0], eps=EPS)


@pytest.mark.parametrize("columns", [1024, 2880, 4096, 8128, 8192])
def test_kernel_lowers_for_cuda(hopper, columns):
    x, scale = (jax.ShapeDtypeStruct((n, columns), "bfloat16") for n in (9, 4))
    traced = jax.jit(lambda x, scale, layer: rms_norm(x, scale, eps=EPS, layer_index=layer)).trace(
        x, scale, jax.ShapeDtypeStruct((), jnp.int32)
    )
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("columns", "dtype"), [(1000, "bfloat16"), (960, "bfloat16"), (16384, "bfloat16"), (1024, "float32")]
)
def test_what_the_kernel_does_not_take_is_refused_and_done_by_xla(hopper, columns, dtype):
    x, scale = rows(2, columns, dtype=dtype), rows(columns, dtype=dtype, key=1)
    assert_norm(rms_norm(x, scale, eps=EPS, implementation="xla"), x, scale)
    with pytest.raises(NotImplementedError, match="1,024 to 8,192"):
        rms_norm(x, scale, eps=EPS, implementation="mosaic")


def test_without_hopper_the_kernel_is_refused():
    x = rows(2, 1024, dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="Hopper"):
        rms_norm(x, x[0], eps=EPS, implementation="mosaic")


@pytest.mark.parametrize(
    ("scale", "given", "match"),
    [
        (jnp.ones(39), {}, "`scale` must be"),
        (jnp.ones((2, 40)), {}, "`layer_index` given"),
        (jnp.ones(40), {"layer_index": 0}, "`scale` must be"),
        (jnp.ones(40), {"implementation": "cuda"}, "`implementation`"),
        *[(jnp.ones((2, 40)), {"layer_index": layer}, "`layer_index`") for layer in (-1, 5)],
        (jnp.ones((2, 40)), {"layer_index": jnp.int32(5)}, "`layer_index`"),
        ([1.0] * 40, {}, "`scale`"),
    ],
)
def test_bad_arguments_get_a_sentence(scale, given, match):
    with pytest.raises(ValueError, match=match):
        inspect.unwrap(rms_norm)(jnp.ones((2, 40)), scale, eps=EPS, **given)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "columns", "dtype"),
    [
        (1, 4096, "bfloat16"),
        (256, 4096, "float16"),
        (7, 8192, "bfloat16"),
        (64, 2880, "bfloat16"),
        (3, 1088, "float16"),
    ],
)
def test_kernel_on_a_gpu(num_rows, columns, dtype):
    x, scale = rows(num_rows, columns, dtype=dtype), rows(3, columns, dtype=dtype, key=1)
    out = rms_norm(x, scale, eps=EPS, layer_index=jnp.int32(2), implementation="mosaic")
    assert_norm(out, x, scale[2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "columns", "dtype"),
    [(1, 2048, "bfloat16"), (8, 4096, "float16"), (1, 2880, "bfloat16"), (64, 4096, "bfloat16")],
)
def test_kernel_adds_splits_on_a_gpu(num_rows, columns, dtype):
    x, addition = (rows(num_rows, columns, dtype=dtype, key=key) for key in range(2))
    scale, addition = rows(2, columns, dtype=dtype, key=2), splits_of(addition, 8)
    addition = rounded(addition) if num_rows > 16 else addition
    results = add_rms_norm(x, addition, scale, eps=EPS, layer_index=1, implementation="mosaic")
    assert_added(results, x, addition, scale[1])
