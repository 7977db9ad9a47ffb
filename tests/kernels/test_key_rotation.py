"""The largest keys of e5m2, rotated inside attention: float16 holds them only if they are made smaller."""

import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec, paged_decode, paged_extend
from jattn_kernels.call import AttentionOptions
from jattn_kernels.mosaic.sm90.decode import split_kv as paged
from jattn_kernels.mosaic.sm90.extend import entry as extend
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.mosaic_calls import run
from tests.often import slow

SPEC = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=128, rope_theta=1e4)
PAGE, LEN = 16, 70


@pytest.fixture
def interpreter(monkeypatch):
    monkeypatch.setattr(paged, "num_sms", lambda: 1)
    with interpreted():
        yield


def pages_and_lens():
    rng, shape = np.random.default_rng(0), (1 + -(-LEN // PAGE), PAGE, 1, SPEC.head_dim)
    largest = float(jnp.finfo(jnp.float8_e5m2).max)
    k = jnp.asarray(largest * rng.choice([-1.0, 1.0], shape), jnp.float8_e5m2)
    v = jnp.asarray(rng.standard_normal(shape), jnp.float8_e5m2)
    table = jnp.arange(1, shape[0], dtype=jnp.int32)[None]
    return k, v, table, jnp.asarray([LEN], jnp.int32), jnp.float32(1 / largest)


# float16 is the one that the largest keys would overflow.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decode_rotates_the_largest_keys_of_e5m2(interpreter, dtype):
    *args, k_scale = pages_and_lens()
    q = jnp.asarray(np.random.default_rng(1).standard_normal((1, 1, 2, SPEC.head_dim)), dtype)
    want = paged_decode(q, *args, spec=SPEC, k_scale=k_scale, implementation="xla")
    assert np.isfinite(np.asarray(want, np.float32)).all()
    out, _ = run(paged.paged_decode, "paged_decode", (q, *args), AttentionOptions(k_scale=k_scale), SPEC, PAGE)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(want, np.float32), atol=0.02)


@pytest.mark.parametrize(
    ("ahead", "dtype"),
    [
        (False, "float16"),
        *(slow(*facts) for facts in [(True, "bfloat16"), (False, "bfloat16"), (True, "float16")]),
    ],
)
def test_extend_rotates_the_largest_keys_of_e5m2(interpreter, monkeypatch, ahead, dtype):
    monkeypatch.setattr(extend, "has_prepass", lambda *_, **__: ahead)
    *args, k_scale = pages_and_lens()
    cu_q_lens = jnp.asarray([0, 5], jnp.int32)
    q = jnp.asarray(np.random.default_rng(1).standard_normal((5, 2, SPEC.head_dim)), dtype)
    want = paged_extend(q, *args, cu_q_lens, spec=SPEC, k_scale=k_scale, implementation="xla")
    assert np.isfinite(np.asarray(want, np.float32)).all()
    options = AttentionOptions(k_scale=k_scale)
    out, _ = run(extend.paged_extend, "paged_extend", (q, *args, cu_q_lens), options, SPEC, PAGE)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(want, np.float32), atol=0.02)
