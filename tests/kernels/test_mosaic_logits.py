"""Mosaic's own formulas of logits, in float32 on the CPU, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.mosaic.sm90.common.logits import LOG2E, base2_logits


@pytest.mark.parametrize("cap", [1e-3, 5.0, 30.0, 50.0, 51.0, 1e3, 1e4, 1e6, 1e30])
def test_capped_logits_are_as_exact_as_float32_is(cap):
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=64, sm_scale=1.0, logits_soft_cap=cap)
    size = np.geomspace(1e-6, 1e5, 4001)
    logits = np.concatenate([-size, size, [0.0]]).astype(np.float32)
    exact = cap * np.tanh(logits.astype(np.float64) / cap)
    found = np.asarray(base2_logits(jnp.asarray(logits), spec), np.float64) / LOG2E
    np.testing.assert_array_less(np.abs(found - exact), 1e-5 + 4e-7 * np.abs(exact))
