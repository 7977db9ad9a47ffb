"""FlashInfer's deprecated and less usual names do what its present ones do."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    merge_state,
    merge_state_in_place,
    packbits,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)

SIZES = {"num_qo_heads": 4, "num_kv_heads": 2, "q_data_type": "float32"}
LISTS = ([0, 2, 3], [4, 1, 2], [1, 4])
FACTS = [
    {"window_left": 1, "sm_scale": 0.7},
    {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 2.0},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 1e3, "rope_scale": 2.0},
    {},
]


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


PAGES = normal(5, 4, 2, 8, seed=1), normal(5, 4, 2, 8, seed=2)
KEYS = normal(9, 2, 8, seed=3), normal(9, 2, 8, seed=4)


def decode():
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    return wrapper, lambda **facts: wrapper.begin_forward(*LISTS, head_dim=8, page_size=4, **SIZES, **facts), PAGES


def paged():
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None)
    lists = ([0, 2, 3], *LISTS)
    return wrapper, lambda **facts: wrapper.begin_forward(*lists, head_dim_qk=8, page_size=4, **SIZES, **facts), PAGES


def ragged():
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(None)
    return wrapper, lambda **facts: wrapper.begin_forward([0, 2, 3], [0, 5, 9], head_dim_qk=8, **SIZES, **facts), KEYS


def arguments(wrapper, keys):
    rows = 2 if isinstance(wrapper, BatchDecodeWithPagedKVCacheWrapper) else 3
    return (normal(rows, 4, 8), *(keys if isinstance(wrapper, BatchPrefillWithRaggedKVCacheWrapper) else (keys,)))


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: "_".join(facts) or "defaults")
@pytest.mark.parametrize("make", [decode, paged, ragged])
def test_forward_has_facts_of_its_own_in_place_of_the_plans(make, facts):
    wrapper, plan, keys = make()
    if make is not decode and not facts.get("pos_encoding_mode"):
        facts = facts | {"causal": bool(facts)}
    given = arguments(wrapper, keys)
    plan(**facts)
    expected = wrapper.run(*given, return_lse=True)
    planned = plan(window_left=0, pos_encoding_mode="NONE", sm_scale=3.0)
    chex.assert_trees_all_equal(wrapper.forward_return_lse(*given, **facts), expected)
    chex.assert_trees_all_equal(wrapper.forward(*given, planned=planned, **facts), expected[0])
    wrapper.end_forward()
    assert not np.allclose(wrapper.run(*given), expected[0])


@pytest.mark.parametrize("make", [decode, ragged])
def test_run_returns_what_it_is_given_room_for(make):
    wrapper, plan, keys = make()
    plan()
    given = arguments(wrapper, keys)
    expected = wrapper.run_return_lse(*given)
    room = {"out": jnp.zeros_like(expected[0]), "lse": jnp.zeros_like(expected[1])}
    chex.assert_trees_all_equal(wrapper.run(*given, return_lse=True, **room), expected)
    for name, wrong in (("out", room["out"][1:]), ("out", np.zeros(room["out"].shape, np.float32)), ("lse", 5)):
        with pytest.raises(ValueError, match=f"`{name}`"):
            wrapper.run(*given, **{name: wrong})
    with pytest.raises(ValueError, match="it is not written, and what is returned is new"):
        wrapper.run(*given, out=room["out"].astype("bfloat16"))


MASK = np.random.default_rng(5).random((3, 9)) < 0.6


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("facts", [*FACTS, {"causal": True}, {"custom_mask": MASK}], ids=lambda facts: "_".join(facts))
def test_single_prefill_is_ragged_prefill_of_one_sequence(facts, layout):
    wrapper, q = BatchPrefillWithRaggedKVCacheWrapper(None), normal(3, 4, 8)
    wrapper.plan([0, 3], [0, 9], head_dim_qk=8, **SIZES, **facts)
    expected = wrapper.run(q, *KEYS, return_lse=True)
    keys = KEYS if layout == "NHD" else tuple(array.swapaxes(0, 1) for array in KEYS)
    given = (q, *keys)
    found = single_prefill_with_kv_cache(*given, kv_layout=layout, return_lse=True, **facts)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
    if "custom_mask" in facts:
        packed = packbits(MASK.reshape(-1), "little")
        of_bits = jax.jit(lambda *given, bits: single_prefill_with_kv_cache(*given, packed_custom_mask=bits))
        if layout == "NHD":
            np.testing.assert_allclose(of_bits(*given, bits=jnp.asarray(packed)), found[0], rtol=1e-5, atol=1e-6)


def test_single_prefill_of_one_causal_query_is_single_decode():
    q, scales = normal(1, 4, 8), {"q": 0.5, "k": 2.0, "v": 3.0}
    out = single_prefill_with_kv_cache(
        q, *KEYS, **{f"scale_{name}": scale for name, scale in scales.items()}, causal=True, o_dtype="bfloat16"
    )
    of_decode = single_decode_with_kv_cache(q[0], *KEYS, **{f"{name}_scale": scale for name, scale in scales.items()})
    np.testing.assert_array_equal(out[0], of_decode.astype("bfloat16"))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"q": normal(4, 8)}, "q"),
        ({"custom_mask": MASK[:2]}, "custom_mask"),
        ({"custom_mask": MASK.astype(np.float32)}, "custom_mask"),
        ({"packed_custom_mask": np.zeros(3, np.uint8)}, "packed_custom_mask"),
        ({"o_dtype": "int8"}, "o_dtype"),
        ({"scale_k": "x"}, "scale_k"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_single_prefill_refuses_by_name(changes, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        single_prefill_with_kv_cache(**({"q": normal(3, 4, 8), "k": KEYS[0], "v": KEYS[1]} | changes))


@pytest.mark.usefixtures("unchecked")
def test_merge_in_place_returns_the_merged_pair_where_the_mask_is_true():
    v, s, v_other, s_other = normal(3, 4, 8), normal(3, 4), normal(3, 4, 8, seed=1), normal(3, 4, seed=1)
    merged = merge_state(v, s, v_other, s_other)
    chex.assert_trees_all_equal(merge_state_in_place(v, s, v_other, s_other), merged)
    mask = np.array([True, False, True])
    for found, new, old in zip(merge_state_in_place(v, s, v_other, s_other, mask), merged, (v, s), strict=True):
        np.testing.assert_array_equal(found[mask], new[mask])
        np.testing.assert_array_equal(found[~mask], old[~mask])
    for changes, name in (({"mask": mask[:2]}, "mask"), ({"v_other": v[:2]}, "v_other"), ({"s": None}, "s")):
        with pytest.raises(ValueError, match=f"`{name}`"):
            merge_state_in_place(**({"v": v, "s": s, "v_other": v_other, "s_other": s_other} | changes))
