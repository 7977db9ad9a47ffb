"""What FlashInfer's surface says of what a user hands over and it cannot use; NumPy caches it takes."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    append_paged_kv_cache,
    get_seq_lens,
    merge_state,
    merge_states,
    segment_packbits,
    should_use_tensor_core,
    single_decode_with_kv_cache,
)

pytestmark = pytest.mark.usefixtures("unchecked")


LISTS = {"indptr": [0, 2, 3], "indices": [4, 1, 2], "last_page_len": [1, 4]}
SIZES = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 4, "q_data_type": "float32"}
PREFILL = {
    "qo_indptr": [0, 2, 3],
    "paged_kv_indptr": [0, 2, 3],
    "paged_kv_indices": [4, 1, 2],
    "paged_kv_last_page_len": [1, 4],
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim_qk": 8,
    "page_size": 4,
}
Q, PAGES, KEYS = jnp.ones((2, 4, 8)), jnp.ones((5, 4, 2, 8)), jnp.ones((9, 2, 8))


def planned(**changes):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(**(LISTS | SIZES | changes))
    return wrapper


def refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q_data_type": "int8"}, "`q_data_type`"),
        ({"kv_data_type": "fp8_e8"}, "`kv_data_type`"),
        ({"data_type": "auto"}, "`data_type`"),
        ({"num_qo_heads": 3}, "`num_qo_heads`"),
        ({"num_kv_heads": 0}, "`num_kv_heads`"),
        ({"num_qo_heads": "4"}, "`num_qo_heads`"),
        ({"page_size": "x"}, "`page_size`"),
        ({"window_left": "x"}, "`window_left`"),
        ({"logits_soft_cap": "x"}, "`logits_soft_cap`"),
        ({"sm_scale": [1]}, "`sm_scale`"),
        ({"rope_theta": "x"}, "`rope_theta`"),
        ({"indices": np.array([4.5, 1, 2])}, "`indices`"),
        ({"indices": np.array([2**33, 1, 2])}, "`indices`"),
        ({"last_page_len": [1.5, 4]}, "`last_page_len`"),
        ({"indptr": np.array([0, 2**33, 2**33])}, "`indptr`"),
    ],
)
def test_plan_says_what_it_cannot_use(changes, sentence):
    refused(lambda: planned(**changes), sentence)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"])
def test_plan_takes_the_names_of_fp8(name):
    plan = BatchDecodeWithPagedKVCacheWrapper(None).plan(**(LISTS | SIZES), kv_data_type=name)
    assert (plan.q_dtype, plan.kv_dtype) == ("float32", "float8_e4m3fn")


def test_plan_of_automatic_keys_has_the_queries_dtype_and_counts_of_numpy():
    sizes = {name: np.int64(SIZES[name]) for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")}
    plan = BatchDecodeWithPagedKVCacheWrapper(None).plan(**(LISTS | SIZES | sizes), kv_data_type="auto")
    assert (plan.kv_dtype, plan.spec.num_q_heads) == ("float32", 4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head_dim_qk": "x"}, "`head_dim_qk`"),
        ({"head_dim_vo": 0}, "`head_dim_vo`"),
        ({"paged_kv_indices": [4.5, 1, 2]}, "`paged_kv_indices`"),
        ({"pos_encoding_mode": "ROPE_LLAMA", "head_dim_qk": 7}, "`head_dim_qk`"),
    ],
)
def test_prefill_plan_says_what_it_cannot_use(changes, sentence):
    refused(lambda: BatchPrefillWithPagedKVCacheWrapper(None).plan(**(PREFILL | changes)), sentence)


def test_wrappers_say_what_no_buffer_and_no_implementation_is():
    buffers = {f"paged_kv_{name}_buffer": 3 for name in ("indptr", "indices", "last_page_len")}
    refused(
        lambda: BatchDecodeWithPagedKVCacheWrapper(None, use_cuda_graph=True, **buffers),
        "`paged_kv_indptr_buffer` must be an array of one axis, or a `jax.ShapeDtypeStruct`. Got int",
    )
    refused(
        lambda: CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *(np.zeros(n, np.int32) for n in (5, 8, 3))),
        r"^`indptr_buffer` must be \[batch_size \+ 1\] and `last_page_len_buffer` \[batch_size\]",
    )
    refused(lambda: BatchDecodeWithPagedKVCacheWrapper(None, implementation=["xla"]), "`implementation`")


@pytest.mark.parametrize(
    ("cache", "sentence"),
    [
        ((PAGES,), "`paged_kv_cache` must be a pair of arrays, .* Got paged_kv_cache: tuple of 1"),
        ((PAGES, PAGES, PAGES), "Got paged_kv_cache: tuple of 3"),
        (None, "`paged_kv_cache` must be a pair of arrays, .* Got paged_kv_cache=None"),
        ((PAGES, None), r"`paged_kv_cache\[1\]`"),
        ((PAGES, PAGES[:3]), r"`paged_kv_cache\[0\]`"),
        ((PAGES[:, :, :1],) * 2, r"`paged_kv_cache\[0\]`"),
        (jnp.ones((5, 3, 4, 2, 8)), "`paged_kv_cache`"),
        ((PAGES[:4],) * 2, "`paged_kv_cache` must have the 5 pages of the plan. Got 4"),
    ],
)
def test_run_says_what_no_cache_is(cache, sentence):
    refused(lambda: planned().run(Q, cache), sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"q": None}, "`q`"),
        ({"q": Q[0]}, r"`q` must have the planned 2 rows of float32, 4 heads of 8. Got q.shape=\(4, 8\)"),
        ({"q": Q[:, None]}, r"Got q.shape=\(2, 1, 4, 8\)"),
        ({"k_scale": "x"}, "`k_scale`"),
        ({"planned": 5}, "`planned` must be what this wrapper's `plan` returned. Got int"),
    ],
)
def test_run_says_what_it_cannot_use(arguments, sentence):
    refused(lambda: planned().run(**({"q": Q, "paged_kv_cache": (PAGES, PAGES)} | arguments)), sentence)


def test_one_array_for_keys_and_narrower_values_is_refused():
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None)
    wrapper.plan(**PREFILL, head_dim_vo=4, q_data_type="float32")
    refused(
        lambda: wrapper.run(jnp.ones((3, 4, 8)), jnp.ones((5, 2, 4, 2, 8))), "must be a pair of arrays where a value"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"k": KEYS[0]}, "`k`"),
        ({"v": None}, "`v`"),
        ({"k": jnp.ones((2, 3, 8))}, "`k` must have the 9 keys of the plan. Got 3"),
    ],
)
def test_ragged_run_says_what_it_cannot_use(arguments, sentence):
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(None, "HND")
    wrapper.plan([0, 1, 2], [0, 5, 9], 4, 2, 8, q_data_type="float32")
    given = {"q": Q, "k": KEYS.swapaxes(0, 1), "v": KEYS.swapaxes(0, 1)}
    refused(lambda: wrapper.run(**(given | arguments)), sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"k": KEYS[0]}, "`k`"),
        ({"k": KEYS[0], "kv_layout": "HND"}, "`k`"),
        ({"q": Q}, "`q`"),
        ({"q": jnp.ones((3, 8))}, "The heads of `q` must be a multiple of those of `k`. Got 3 and 2"),
        ({"q": jnp.ones((1, 8))}, "The heads of `q` must be a multiple of those of `k`. Got 1 and 2"),
        ({"q": jnp.ones((4, 6))}, "`q` and `k` must have heads of one width. Got 6 and 8"),
        ({"k": KEYS[:, :0], "v": KEYS[:, :0]}, "`q`, `k` and `v` must not be empty"),
        ({"v": KEYS[:3]}, "`k` and `v` must have as many tokens and heads"),
        ({"sm_scale": "x"}, "`sm_scale`"),
    ],
)
def test_single_decode_says_what_it_cannot_use(arguments, sentence):
    refused(lambda: single_decode_with_kv_cache(**({"q": Q[0], "k": KEYS, "v": KEYS} | arguments)), sentence)


APPEND = {
    "append_key": jnp.ones((3, 2, 8)),
    "append_value": jnp.ones((3, 2, 8)),
    "batch_indices": [0, 0, 1],
    "positions": [4, 5, 2],
    "kv_indices": [4, 1, 2],
    "kv_indptr": [0, 2, 3],
    "kv_last_page_len": [2, 4],
}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"paged_kv_cache": (PAGES,)}, "`paged_kv_cache` must be a pair of arrays"),
        ({"paged_kv_cache": PAGES[0]}, "`paged_kv_cache` must have pages of tokens of heads"),
        ({"append_key": jnp.ones((3, 2, 4))}, r"`append_key` must be \[T, 2, 8\] as the pages are"),
        ({"append_value": None}, "`append_value`"),
        ({"batch_indices": [0, 0]}, "`batch_indices`"),
        ({"positions": [4.5, 5, 2]}, "`positions`"),
        ({"kv_indices": jnp.array([4.5, 1, 2])}, "`kv_indices`"),
        ({"kv_indptr": [0, 2]}, "`kv_indptr`"),
        ({"kv_last_page_len": None}, "`kv_last_page_len`"),
        ({"k_scale": jnp.ones(3)}, "`k_scale`"),
    ],
)
def test_append_says_what_it_cannot_use(arguments, sentence):
    refused(lambda: append_paged_kv_cache(**({"paged_kv_cache": (PAGES, PAGES)} | APPEND | arguments)), sentence)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: merge_state(Q, Q[..., 0], Q[:1], Q[..., 0]), "`v_a` and `v_b` must have one shape"),
        (lambda: merge_state(None, Q[..., 0], Q, Q[..., 0]), "`v_a`"),
        (lambda: merge_state(Q, Q[..., 0], Q.astype("bfloat16"), Q[..., 0]), "`v_a`"),
        (lambda: merge_states(Q, Q), "`v`"),
        (lambda: merge_states(Q[None], Q[None]), "`s`"),
        (lambda: merge_states(Q[None], Q), "`s` must have the shape of `v` without its last axis"),
        (lambda: get_seq_lens([0, 1], [1, 1], 4), "`kv_indptr`"),
        (lambda: segment_packbits([True] * 3, [0, 5]), "`indptr` must end at 3 at most, as `x` does"),
        (lambda: segment_packbits([1.5], [0, 1]), r"`x` must be bools \[bits\]"),
        (lambda: should_use_tensor_core("float16", 32, 0), "`num_kv_heads`"),
        (lambda: should_use_tensor_core("float16", 4, 8), "`num_attention_heads`"),
        (lambda: should_use_tensor_core("int8", 32, 8), "`kv_cache_dtype`"),
    ],
)
def test_functions_say_what_they_cannot_use(call, sentence):
    refused(call, sentence)


def test_numpy_caches_are_as_jax_ones():
    rng = np.random.default_rng(0)
    pages = rng.normal(size=(2, 5, 4, 2, 8)).astype(np.float32)
    wrapper, pair, one = planned(), tuple(pages), np.stack(tuple(pages), axis=1)
    expected = wrapper.run(Q, tuple(map(jnp.asarray, pages)))
    for cache in (pair, list(pair)):
        chex.assert_trees_all_equal(wrapper.run(Q, cache), expected)
    np.testing.assert_allclose(wrapper.run(np.asarray(Q), one), expected, rtol=1e-5)  # summed in another order
    appended = append_paged_kv_cache(paged_kv_cache=pair, **APPEND)
    arrays = {name: jnp.asarray(values) for name, values in APPEND.items()}
    chex.assert_trees_all_equal(
        appended, append_paged_kv_cache(paged_kv_cache=tuple(map(jnp.asarray, pages)), **arrays)
    )
    chex.assert_trees_all_equal(append_paged_kv_cache(paged_kv_cache=one, **APPEND)[:, 0], appended[0])
    assert (np.asarray(appended[0]) != pages[0]).any()
