"""Weights that a product asks the cache for: how many of them, in which products, and that no result changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import Ahead, QuantizedKernel, added, matmul_gated, matmul_splits
from jattn_kernels.call import Device
from jattn_kernels.mosaic.sm90.common.asked_ahead import AheadOperands, rows_asked_for
from tests.kernels import test_fp8_kernel as of_fp8
from tests.kernels import test_int4_kernel as of_int4
from tests.kernels.harness.interpreter import interpreted

ASKS = "cp.async.bulk.prefetch.L2"


@pytest.fixture
def hopper(monkeypatch):
    """Dispatch believes in a Hopper GPU."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))


def weights(*shape, dtype="int4"):
    """Those of a product that comes later, of some layers."""
    return Ahead(values=jax.ShapeDtypeStruct(shape, dtype), layer_index=jax.ShapeDtypeStruct((), "int32"))


def operands_of(*shape, dtype="int4"):
    return AheadOperands(jax.ShapeDtypeStruct(shape, dtype), None)


def test_rows_are_asked_for_until_there_are_so_many_bytes():
    whole = operands_of(4, 4096, 4096)  # 8 MB
    half = operands_of(4, 8192, 4096, dtype="float8_e4m3fn")  # 32 MB
    assert rows_asked_for([whole, half, half], 24 << 20) == [32, 16, 0]
    assert rows_asked_for([half], 0) == [0]
    assert rows_asked_for([], 1 << 20) == []


def test_weights_are_asked_for_that_lie_in_a_stack_in_few_bits():
    values, layer = jnp.zeros((2, 64, 32), jnp.int4), jnp.int32(1)
    kernel = QuantizedKernel(values=values, scales=jnp.ones((2, 1, 64)))
    (ahead,) = Ahead.of(kernel, layer)
    assert ahead.values is values
    assert int(ahead.layer_index) == 1
    assert not Ahead.of(jax.tree.map(lambda leaf: leaf[0], kernel), None)
    assert not Ahead.of(jnp.zeros((2, 32, 64)), layer)


@pytest.mark.parametrize(("rows", "columns", "asks"), [(8192, 4096, True), (8200, 4096, False), (8192, 16, False)])
def test_rows_that_do_not_come_out_even_are_not_asked_for(rows, columns, asks):
    ahead = Ahead(values=jnp.zeros((1, rows, columns), jnp.int4), layer_index=jnp.int32(0))
    assert bool(AheadOperands.of([ahead])) == asks


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("dtype", ["int4", "float8_e4m3fn"])
@pytest.mark.parametrize("gated", [False, True])
def test_products_ask_for_weights_on_hopper(hopper, rows, dtype, gated):
    in_int4, layer = dtype == "int4", jax.ShapeDtypeStruct((), "int32")
    values, of_scales = jax.ShapeDtypeStruct((2, 8192, 4096), dtype), (2, 32, 8192) if in_int4 else (2, 8192, 1)
    kernel = QuantizedKernel(values=values, scales=jax.ShapeDtypeStruct(of_scales, "float32"), interleaved=in_int4)

    def product(x, kernel, layer, ahead):
        if gated:
            return matmul_gated(x, kernel, of_int4.silu_gate, layer_index=layer, ahead=ahead)
        return matmul_splits(x, kernel, layer_index=layer, ahead=ahead)

    def text(*ahead):
        traced = jax.jit(product).trace(jax.ShapeDtypeStruct((rows, 4096), "bfloat16"), kernel, layer, ahead)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert ASKS in text(weights(2, 4096, 14336, dtype=dtype), weights(2, 8192, 4096))
    assert ASKS not in text()


@pytest.mark.parametrize("rows", [1, 60])
def test_no_result_depends_on_it(monkeypatch, rows):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 3))
    x, kernel = of_int4.operands(rows, 512, 128, 128)
    with interpreted():
        product, other = (
            added(matmul_splits(x, kernel, layer_index=1, ahead=ahead, implementation="mosaic"))
            for ahead in ((), Ahead.of(kernel, jnp.int32(0)))
        )
    np.testing.assert_array_equal(np.asarray(product, np.float32), np.asarray(other, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_products_that_ask_on_a_gpu(rows):
    ahead = Ahead(values=jnp.zeros((3, 28672, 4096), jnp.int4), layer_index=jnp.int32(2))
    for of in (of_int4, of_fp8):
        x, kernel = of.operands(rows, 4096, 6144, *((128,) if of is of_int4 else ()))
        product, other = (
            jax.jit(lambda x, kernel, ahead: added(matmul_splits(x, kernel, layer_index=1, ahead=ahead)))(
                x, kernel, ahead
            )
            for ahead in ((), (ahead, *Ahead.of(kernel, jnp.int32(1))))
        )
        np.testing.assert_array_equal(np.asarray(product, np.float32), np.asarray(other, np.float32))
