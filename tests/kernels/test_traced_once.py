"""Equal calls of kernels, which are traced and lowered once in a program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jattn_kernels import rms_norm
from jattn_kernels.call import Device, NormCall
from jattn_kernels.traced_once import run_once, traced_once

CALL = NormCall(num_rows=2, columns=4, dtype="float32", scale_dtype="float32", eps=0.0, offset=0.0)
traced = []


def run(call, operands):
    traced.append(call)
    return operands * call.columns


def test_equal_calls_are_traced_once_in_a_program():
    traced.clear()
    other, x = dataclasses.replace(CALL, columns=8), jnp.ones(3)
    with traced_once():
        results = [run_once(run, call, x) for call in (CALL, dataclasses.replace(CALL), other)]
    assert traced == [CALL, other]
    for result, factor in zip(results, (4, 4, 8), strict=True):
        np.testing.assert_array_equal(result, np.full(3, factor, np.float32))


def test_nothing_is_kept_for_another_program():
    traced.clear()
    for _ in range(2):
        with traced_once():
            run_once(run, CALL, jnp.ones(3))
        run_once(run, CALL, jnp.ones(3))
    assert len(traced) == 4


def test_a_kernel_that_is_called_twice_is_lowered_once(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    x, scale = jax.ShapeDtypeStruct((3, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024,), jnp.bfloat16)

    def twice(x, scale):
        return rms_norm(rms_norm(x, scale, eps=1e-5), scale, eps=1e-5)

    def num_kernels():
        text = jax.jit(lambda *args: twice(*args)).trace(x, scale).lower(lowering_platforms=("cuda",)).as_text()
        return text.count("@mosaic_gpu_v2")

    assert num_kernels() == 2
    with traced_once():
        assert num_kernels() == 1
