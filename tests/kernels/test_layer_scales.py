"""Scales of all layers: a call reads its own layer's."""

import functools

import jax

import jattn_kernels
from tests.kernels.harness.case_table import assert_close, build
from tests.kernels.harness.kernel_sized_batches import case_of, spec_of


def test_a_layers_scales_are_its_own():
    scales = {"kv_dtype": "float8_e4m3fn", "kv_scale": "rows", "num_layers": 2, "layer_index": 1}
    case = case_of("paged_decode", "scales", spec=spec_of(num_q_heads=32, num_kv_heads=32, head_dim=64), **scales)
    inputs = build(case)
    attend = jax.jit(functools.partial(jattn_kernels.paged_decode, spec=case.spec, return_lse=True))
    assert_close(case, inputs, *attend(*inputs.args, **inputs.options))
