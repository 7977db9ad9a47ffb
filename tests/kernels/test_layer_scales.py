"""Scales of all layers: a call reads its own layer's, and a kernel gets them as no view that it would refuse."""

import functools

import jax
import pytest

import jattn_kernels
from jattn_kernels.call import Device
from tests.kernels.harness.case_table import assert_close, build
from tests.kernels.harness.kernel_sized_cases import case_of, spec_of

_OF_LAYERS = {"kv_dtype": "float8_e4m3fn", "kv_scale": "rows", "num_layers": 2, "layer_index": 1}


@pytest.mark.parametrize(("num_heads", "num_sums"), [(32, 2), (64, 0), (16, 0)])
@pytest.mark.parametrize("operation", ["paged_decode", "paged_extend", "ragged_extend"])
def test_a_layers_scales_are_no_view_that_a_kernel_refuses(monkeypatch, operation, num_heads, num_sums):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    spec = spec_of(num_q_heads=num_heads, num_kv_heads=num_heads, head_dim=64)
    args, kwargs = build(case_of(operation, "scales", spec=spec, **_OF_LAYERS))
    attend = functools.partial(getattr(jattn_kernels, operation), implementation="mosaic", **kwargs)
    sums = [eqn for eqn in jax.make_jaxpr(attend)(*args).eqns if eqn.primitive.name == "reduce_sum"]
    assert sum(eqn.invars[0].aval.shape == (2, num_heads) for eqn in sums) == num_sums


def test_a_layers_scales_are_its_own():
    case = case_of("paged_decode", "scales", spec=spec_of(num_q_heads=32, num_kv_heads=32, head_dim=64), **_OF_LAYERS)
    inputs = build(case)
    attend = functools.partial(jattn_kernels.paged_decode, return_lse=True)
    assert_close(case, inputs, *attend(*inputs.args, **inputs.kwargs))
