"""A prompt's new tokens attend in one pass over pages, or in one over the pages before and one over rows: the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec, merge_state, paged_extend, ragged_extend, write_pages
from jattn_kernels.call import default_device

PAGE, HEAD_DIM = 16, 64
Q_LENS, KV_LENS = (40, 1, 7), (300, 1, 129)  # the second has no keys from before
HOPPER = (9, 0)


def in_one_and_in_two(implementation, dtype, **facts):
    """Output and lse of both ways."""
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, **facts)
    keys = jax.random.split(jax.random.key(0), 5)
    num_tokens, most_pages = sum(Q_LENS), -(-max(KV_LENS) // PAGE)
    q = jax.random.normal(keys[0], (num_tokens, spec.num_q_heads, HEAD_DIM), dtype)
    k, v = (jax.random.normal(key, (num_tokens, 2, HEAD_DIM), dtype) for key in keys[1:3])
    pools = [jax.random.normal(key, (3 * most_pages, PAGE, 2, HEAD_DIM), dtype) for key in keys[3:]]
    table = jnp.arange(3 * most_pages, dtype=jnp.int32).reshape(3, most_pages)
    ends = jnp.asarray(np.cumsum((0, *Q_LENS)), jnp.int32)
    lens = jnp.asarray(KV_LENS, jnp.int32)
    before = lens - jnp.asarray(Q_LENS, jnp.int32)
    slots = np.concatenate(
        [
            row * most_pages * PAGE + np.arange(kv - q, kv)
            for row, (q, kv) in enumerate(zip(Q_LENS, KV_LENS, strict=True))
        ]
    )
    options = {"return_lse": True, "implementation": implementation}
    pages = write_pages(*pools, k, v, jnp.asarray(slots, jnp.int32))
    one = paged_extend(q, *pages, table, lens, ends, spec=spec, **options)
    of_pages = dataclasses.replace(spec, causal=False)  # all of them lie before
    past = paged_extend(q, *pools, table, before, ends, spec=of_pages, q_start=before, **options)
    own = ragged_extend(q, k, v, ends, ends, spec=spec, **options)
    return one, merge_state(*past, *own)


@pytest.mark.slow  # test_flashinfer_prefill merges prompts in parts
@pytest.mark.parametrize("facts", [{}, {"logits_soft_cap": 5.0}], ids=str)
def test_two_passes_give_what_one_gives(facts):
    one, two = in_one_and_in_two("xla", jnp.float32, **facts)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("facts", [{}, {"logits_soft_cap": 5.0}], ids=str)
def test_two_passes_give_what_one_gives_on_a_gpu(dtype, facts):
    if default_device().compute_capability != HOPPER:
        pytest.skip("only Hopper has these kernels")
    (out, lse), (merged, merged_lse) = in_one_and_in_two("mosaic", dtype, **facts)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(merged, np.float32), atol=0.02)
    np.testing.assert_allclose(lse, merged_lse, atol=0.002)
