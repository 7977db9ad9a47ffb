"""An activation that a product of many rows takes: under the interpreter, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import QuantizedKernel, Ungated, matmul_gated, quantize_kernel
from jattn_kernels.call import Device
from jattn_kernels.lowering.expert_groups import silu_gate
from jattn_kernels.ungated import gated
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.products import operands

SUMS_IN_F32 = 2e-6  # of a product's size
EXP = 1e-6  # of what a GPU's exponential gives


def scaled_operands(rows, depth, units, dtype="bfloat16"):
    """Rows and weights whose products are about 1: NaN in all layers but the last."""
    x, kernel = operands(rows, depth, 2 * units, dtype=dtype)
    return x, kernel * depth**-0.5


def assert_gated(out, x, kernel):
    """`out` is silu(gate) * up of the last layer, to its own last place and what sums and an exponential lose."""
    rows, weights = np.asarray(x, np.float64), np.asarray(kernel[-1], np.float64)
    gate, up = np.split(rows @ weights, 2, axis=1)
    of_gate, of_up = np.split(SUMS_IN_F32 * (np.abs(rows) @ np.abs(weights)), 2, axis=1)
    share = 1 / (1 + np.exp(-gate))
    expected = gate * share * up
    lost = 1.1 * of_gate * np.abs(up) + np.abs(gate * share) * of_up + EXP * np.abs(expected)  # silu is no steeper
    assert np.all(
        np.abs(np.asarray(out, np.float64) - expected) <= float(jnp.finfo(out.dtype).eps) * np.abs(expected) + lost
    )


def run(x, kernel, **options):
    number = jnp.int32(kernel.shape[0] - 1)
    return jax.jit(lambda x, k, layer: matmul_gated(x, k, silu_gate, layer_index=layer, **options))(x, kernel, number)


@pytest.fixture
def small_hopper(monkeypatch):
    """A Hopper GPU that two work tiles are enough for."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 2))


@pytest.mark.parametrize(
    ("rows", "depth", "units", "dtype"),
    [(200, 192, 256, "bfloat16"), (136, 64, 128, "float16"), (304, 384, 128, "bfloat16")],
)
def test_kernel_without_races(small_hopper, rows, depth, units, dtype):
    x, kernel = scaled_operands(rows, depth, units, dtype)
    with interpreted():
        out = run(x, kernel, implementation="mosaic")
    assert out.dtype == dtype
    assert_gated(out, x, kernel)


def test_nan_stays_in_its_row(small_hopper):
    x, kernel = scaled_operands(152, 128, 128)
    with interpreted():
        out = run(x.at[70].set(jnp.nan), kernel)
    assert np.isnan(out[70]).all()
    rest = np.arange(152) != 70
    assert_gated(out[rest], x[rest], kernel)


@pytest.mark.parametrize("rows", [1, 128])
def test_activation_is_left_where_no_kernel_takes_it(small_hopper, rows):
    x, kernel = operands(rows, 64, 256, layers=1, dtype="float32")
    left = matmul_gated(x, kernel[0], silu_gate)
    assert isinstance(left, Ungated)
    assert_gated(gated(left), x, kernel)


def test_activation_is_left_to_who_rounds_rows(small_hopper):
    x, kernel = scaled_operands(256, 128, 128)
    in_fp8 = quantize_kernel(kernel[-1].T)
    assert isinstance(in_fp8, QuantizedKernel)
    assert isinstance(jax.eval_shape(lambda x, k: matmul_gated(x, k, silu_gate), x, in_fp8), Ungated)


def test_kernel_has_the_gradient_of_its_formula(small_hopper):
    x, kernel = scaled_operands(160, 64, 128)

    def loss(face):
        return jax.grad(lambda x, k: jnp.sum(jnp.sin(face(x, k).astype(jnp.float32))), argnums=(0, 1))

    def formula(x, kernel):
        return silu_gate(*jnp.split(x @ kernel, 2, axis=1))

    with interpreted():
        got = loss(lambda x, k: matmul_gated(x, k, silu_gate, implementation="mosaic"))(x, kernel[-1])
    for ours, plain in zip(got, loss(formula)(x, kernel[-1]), strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(plain, np.float32), rtol=0.05, atol=0.02)


@pytest.mark.parametrize(("rows", "depth", "units"), [(256, 4096, 14336), (2304, 4096, 14336), (1000, 2048, 8192)])
def test_kernel_is_lowered_for_cuda(monkeypatch, rows, depth, units):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, depth), (2, depth, 2 * units)))
    traced = jax.jit(lambda x, k, layer: matmul_gated(x, k, silu_gate, layer_index=layer)).trace(x, kernel, 1)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((256, 128, 128), "float32", "bfloat16 or float16 alone, not of float32"),
        ((252, 128, 128), "bfloat16", "8 rows, 64 inputs and 128 hidden units, not of 252, 128 and 128"),
        ((256, 96, 128), "bfloat16", "64 inputs and 128 hidden units, not of 256, 96 and 128"),
        ((256, 128, 64), "bfloat16", "64 inputs and 128 hidden units, not of 256, 128 and 64"),
        ((128, 128, 256), "bfloat16", "more than 128 rows that all SMs have work of, not of 128 and 256"),
        ((256, 128, 128), "bfloat16", None),
    ],
)
def test_what_is_not_served_is_left_with_a_reason(small_hopper, shape, dtype, match):
    from jattn_kernels.call import MatmulCall
    from jattn_kernels.mosaic import MOSAIC

    rows, depth, units = shape
    facts = {"dtype": dtype, "kernel_dtype": dtype, "out_dtype": dtype}
    reason = MOSAIC.refuses(MatmulCall(num_rows=rows, depth=depth, columns=2 * units, gate=silu_gate, **facts))
    assert reason is None if match is None else match in str(reason)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "depth", "units", "dtype"),
    [
        (256, 4096, 14336, "bfloat16"),
        (2304, 4096, 14336, "bfloat16"),
        (1000, 2048, 8192, "float16"),
        (392, 5120, 25600, "bfloat16"),
        (264, 64, 17024, "bfloat16"),
    ],
)
def test_kernel_on_a_gpu(rows, depth, units, dtype):
    x, kernel = scaled_operands(rows, depth, units, dtype)
    out = run(x, kernel, implementation="mosaic")
    some = np.random.default_rng(1).integers(0, rows, 32)
    assert_gated(out[some], x[some], kernel)
    np.testing.assert_array_equal(out, run(x, kernel, implementation="mosaic"))
