"""FlashInfer's cascades are attention over the keys of all their levels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.flashinfer import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)
from tests.often import slow

pytestmark = pytest.mark.usefixtures("unchecked")

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32 sums of 18 terms at most, in another order
SIZES, F32 = (4, 2, 8, 4), {"q_data_type": "float32"}
SHARED, OWN = [7, 2], ([0, 1, 2, 4], [5, 0, 3, 1], [2, 4, 1])  # pages of 4 tokens; own lengths 2, 4 and 5
ROWS = [0, 2, 3, 5]
LEVELS = ([[0, 5], ROWS], [[0, 2], OWN[0]], [SHARED, OWN[1]], [[4], OWN[2]])
WHOLE = ([0, 3, 6, 10], [7, 2, 5, 7, 2, 0, 7, 2, 3, 1], OWN[2])


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


PAGES = normal(8, 4, 2, 8, seed=1), normal(8, 4, 2, 8, seed=2)
PREFIX = tuple(pages[jnp.array(SHARED)].reshape(8, 2, 8) for pages in PAGES)


def over_all(q, rows, **facts):
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None)
    wrapper.plan(rows, *WHOLE, *SIZES, **F32, **facts)
    return wrapper.run(q, PAGES)


@pytest.mark.parametrize("facts", [{"causal": True}, slow({"logits_soft_cap": 2.0, "sm_scale": 0.9})], ids=str)
def test_cascade_is_attention_over_all_levels(facts):
    wrapper, q = MultiLevelCascadeAttentionWrapper(2, None), normal(5, 4, 8)
    plans = wrapper.plan(*LEVELS, *SIZES, **F32, **facts)
    expected = over_all(q, ROWS, **facts)
    np.testing.assert_allclose(wrapper.run(q, PAGES), expected, **CLOSE)
    of_step = jax.jit(lambda q, plans: wrapper.forward(q, PAGES, planned=plans))
    np.testing.assert_allclose(of_step(q, plans), expected, **CLOSE)


def test_cascade_with_buffers_takes_smaller_batches():
    def buffers(*sizes):
        return [jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes]

    wrapper = MultiLevelCascadeAttentionWrapper(
        2, None, "NHD", True, buffers(2, 4), buffers(2, 4), buffers(6, 9), buffers(1, 3)
    )
    first = wrapper.plan(*LEVELS, *SIZES, **F32)
    smaller = ([[0, 2], [0, 2]], [[0, 2], [0, 1]], [SHARED, [5]], [[4], [2]])
    second = wrapper.begin_forward(*smaller, *SIZES, **F32)
    assert jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, second)
    q = normal(5, 4, 8)
    np.testing.assert_allclose(wrapper.run(q, PAGES)[:2], over_all(q, ROWS)[:2], **CLOSE)


def test_cascade_refuses_by_name_and_keeps_the_plans_before():
    wrapper, q = MultiLevelCascadeAttentionWrapper(2, None), normal(5, 4, 8)
    wrapper.plan(*LEVELS, *SIZES, **F32)
    expected = wrapper.run(q, PAGES)
    queries, *lists = LEVELS
    for given, name in (
        ((queries[:1], *lists), "qo_indptr_arr"),
        (([[0, 4], ROWS], *lists), "qo_indptr_arr"),
        ((*LEVELS[:3], [[4], [9, 9, 9]]), "paged_kv_last_page_len"),
    ):
        with pytest.raises(ValueError, match=f"`{name}`"):
            wrapper.plan(*given, *SIZES, **F32, sm_scale=3.0)
    np.testing.assert_array_equal(wrapper.run(q, PAGES), expected)
    with pytest.raises(ValueError, match="`planned`"):
        wrapper.run(q, PAGES, planned=5)
    with pytest.raises(ValueError, match="`num_levels`"):
        MultiLevelCascadeAttentionWrapper(0, None)


@pytest.mark.parametrize("layout", [slow("NHD"), "HND"])
def test_shared_prefix_is_attended_with_ones_own_keys(layout):
    def laid_out(arrays):
        return arrays if layout == "NHD" else tuple(jnp.swapaxes(array, -3, -2) for array in arrays)

    q = normal(5, 4, 8)
    prefill = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(None, layout)
    prefill.begin_forward(ROWS, *OWN, *SIZES, **F32)
    found = prefill.forward(q, *laid_out(PREFIX), laid_out(PAGES), causal=True, sm_scale=0.9)
    np.testing.assert_allclose(found, over_all(q, ROWS, causal=True, sm_scale=0.9), **CLOSE)
    decode = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(None, layout)
    decode.begin_forward(*OWN, *SIZES, data_type="float32")
    found = decode.forward(q[:3], *laid_out(PREFIX), laid_out(PAGES))
    np.testing.assert_allclose(found, over_all(q[:3], [0, 1, 2, 3]), **CLOSE)
    with pytest.raises(ValueError, match="`k_shared`"):
        decode.forward(q[:3], None, PREFIX[1], laid_out(PAGES))
