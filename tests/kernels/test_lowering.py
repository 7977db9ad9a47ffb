"""Every case that the GPU runs is lowered for CUDA on the CPU, down to what the GPU's own compiler is given."""

import functools

import jax
import pytest

import jattn_kernels
from jattn_kernels.call import Device
from tests.kernels.harness.case_table import build
from tests.kernels.harness.kernel_sized_cases import KERNEL_SIZED


@pytest.mark.slow
@pytest.mark.parametrize("case", KERNEL_SIZED, ids=lambda case: case.name)
def test_mosaic_lowers_every_case_for_cuda(monkeypatch, case):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    args, kwargs = build(case)
    spec = kwargs.pop("spec")
    attend = functools.partial(getattr(jattn_kernels, case.operation), spec=spec, implementation="mosaic")
    traced = jax.jit(attend).trace(*args, **kwargs)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
