"""Products of few rows by warps: in the interpreter, lowered for CUDA, and on a GPU."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.common.warp_products import product
from tests.kernels.harness.interpreter import interpreted

DEPTH = 128


def multiply(weights, rows, width, *, with_total=False):
    """weights @ rows^T for each 128 of their depth, brought into the same shared memory one after the other."""
    steps, columns, num_rows = weights.shape[1] // DEPTH, weights.shape[0], rows.shape[0]

    def body(weights, rows, out, own_weights, own_rows, full):
        for step in range(steps):
            depth = pl.ds(step * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(weights.at[:, depth], own_weights, full)
            plgpu.copy_gmem_to_smem(rows.at[:, depth], own_rows, full)
            plgpu.barrier_wait(full)
            held = plgpu.load(own_weights, layout=plgpu.Layout.WGMMA)
            total = plgpu.layout_cast(jnp.full((columns, num_rows), 0.5, jnp.float32), plgpu.Layout.WGMMA)
            out[step] = product(held, own_rows, width, total) if with_total else product(held, own_rows, width)

    run = launch.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((steps, columns, num_rows), jnp.float32),
        scratch_types=(
            tiles.tile((columns, DEPTH), weights.dtype),
            tiles.tile((num_rows, DEPTH), rows.dtype, width),
            plgpu.Barrier(num_arrivals=2),
        ),
        kernel_name="products_of_warps",
    )
    return run(weights, rows)


def operands(columns, num_rows, dtype):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((size, 2 * DEPTH)), dtype) for size in (columns, num_rows)]


def assert_products(out, weights, rows, start):
    weights, rows = (np.asarray(x, np.float64).reshape(x.shape[0], -1, DEPTH) for x in (weights, rows))
    exact, size = (np.einsum("csd,rsd->scr", *pair) for pair in [(weights, rows), (np.abs(weights), np.abs(rows))])
    assert np.all(np.abs(np.asarray(out, np.float64) - exact - start) <= 2e-6 * size)


CASES = pytest.mark.parametrize(
    ("columns", "num_rows", "width", "dtype", "with_total"),
    [
        (64, 8, 64, "bfloat16", False),
        (64, 8, 32, "float16", True),
        (128, 24, 64, "bfloat16", True),
    ],
)


@CASES
def test_products_without_races(columns, num_rows, width, dtype, with_total):
    weights, rows = operands(columns, num_rows, dtype)
    with interpreted():
        out = multiply(weights, rows, width, with_total=with_total)
    assert_products(out, weights, rows, 0.5 if with_total else 0)


@CASES
def test_products_are_lowered_for_cuda(columns, num_rows, width, dtype, with_total):
    weights, rows = operands(columns, num_rows, dtype)
    traced = jax.jit(lambda *args: multiply(*args, width, with_total=with_total)).trace(weights, rows)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.gpu
@CASES
def test_products_on_a_gpu(columns, num_rows, width, dtype, with_total):
    weights, rows = operands(columns, num_rows, dtype)
    out = jax.jit(lambda *args: multiply(*args, width, with_total=with_total))(weights, rows)
    assert_products(out, weights, rows, 0.5 if with_total else 0)
