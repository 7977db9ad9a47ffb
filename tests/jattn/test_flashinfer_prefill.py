"""FlashInfer's prefill wrappers, merges and appends agree with the oracle."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.flashinfer import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    merge_state,
    merge_states,
    packbits,
    segment_packbits,
)
from jattn_kernels import reference
from tests.jattn.harness.compile_log import compilations
from tests.jattn.harness.flashinfer_calls import SPEC, assert_base2_close, facts, numbers, page_lists, scales
from tests.kernels.harness.case import Case
from tests.often import often

FP8 = "float8_e4m3fn"


def prefill_case(name, operation="paged_extend", *, q_lens=(5, 1, 12), kv_lens=(37, 1, 70), page_size=16, **options):
    fields = {field.name for field in dataclasses.fields(SPEC)}
    spec = {key: options.pop(key) for key in list(options) if key in fields}
    return Case(
        name=name,
        operation=operation,
        spec=dataclasses.replace(SPEC, **spec),
        q_lens=q_lens,
        kv_lens=kv_lens,
        page_size=page_size,
        **options,
    )


PAGED = [
    prefill_case("all_keys_page_1", causal=False, page_size=1),
    prefill_case("all_keys_windowed_one_array", causal=False, window_left=9, combined_pool="pages_first"),
    prefill_case("empty_rows", q_lens=(4, 0, 3), kv_lens=(0, 6, 8), padding_rows=1),
    prefill_case(
        "narrow_values_in_layers", v_head_dim=8, num_layers=2, layer_index=1, logits_soft_cap=3.0, window_left=11
    ),
    prefill_case("alibi", alibi=True),
    prefill_case("rope", rope_theta=1e4, rope_scale=2.0),
    prefill_case("mask", custom_mask=True),
    prefill_case("mask_of_empty_rows", custom_mask=True, q_lens=(0, 3, 2), kv_lens=(6, 7, 0)),
    prefill_case("fp8", dtype="bfloat16", kv_dtype=FP8, kv_scale="scalar"),
]
RAGGED = [
    prefill_case("all_keys", "ragged_extend", causal=False),
    prefill_case("hnd_window_soft_cap", "ragged_extend", page_layout="HND", window_left=7, logits_soft_cap=2.0),
    prefill_case("mask", "ragged_extend", custom_mask=True),
    prefill_case("narrow_values_rope", "ragged_extend", v_head_dim=8, rope_theta=1e4),
]


def masks(case, inputs, packed):
    """The case's mask, if it has one, as bools or as bits."""
    if not case.custom_mask:
        return {}
    mask = np.asarray(inputs.kwargs["custom_mask"])
    if not packed:
        return {"custom_mask": mask}
    ends = np.concatenate([[0], np.cumsum(np.multiply(case.q_lens, case.kv_lens))])
    return {"packed_custom_mask": segment_packbits(mask, ends, "little")[0]}


def plan_paged(wrapper, case, inputs, packed=False):
    _, _, _, table, lens, starts = inputs.args
    spec = case.spec
    return wrapper.plan(
        starts,
        *page_lists(table, lens, case.page_size),
        spec.num_q_heads,
        head_dim_qk=spec.head_dim,
        head_dim_vo=spec.v_head_dim,
        page_size=case.page_size,
        causal=spec.causal,
        **facts(case),
        **masks(case, inputs, packed),
    )


# A mask, rope and fp8 are also in the cases of test_flashinfer_older_names, test_flashinfer_decode and test_surfaces.
SELDOM = ("mask", "rope", "fp8")


@pytest.mark.parametrize(
    "case", often(PAGED, [case for case in PAGED if case.name not in SELDOM]), ids=lambda case: case.name
)
def test_paged_prefill_agrees_with_the_oracle(case):
    inputs = numbers(case)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None, case.spec.page_layout)
    plan_paged(wrapper, case, inputs)
    q, k_pages, v_pages = inputs.args[:3]
    cache = k_pages if v_pages is None else (k_pages, v_pages)
    layer = {"layer_index": inputs.kwargs.get("layer_index")}
    out, lse = wrapper.run(q, cache, **scales(inputs), return_lse=True, **layer)
    assert_base2_close(case, inputs, out, lse)
    if case.custom_mask:
        packed = plan_paged(wrapper, case, inputs, packed=True)
        np.testing.assert_array_equal(wrapper.run(q, cache, planned=packed, **layer), out)


def plan_ragged(wrapper, case, inputs, packed=False):
    _, _, _, q_starts, kv_starts = inputs.args
    spec = case.spec
    return wrapper.plan(
        q_starts,
        kv_starts,
        spec.num_q_heads,
        head_dim_qk=spec.head_dim,
        head_dim_vo=spec.v_head_dim,
        causal=spec.causal,
        **facts(case),
        **masks(case, inputs, packed),
    )


@pytest.mark.parametrize("case", RAGGED, ids=lambda case: case.name)
def test_ragged_prefill_agrees_with_the_oracle(case):
    inputs = numbers(case)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(None, case.spec.page_layout)
    plan_ragged(wrapper, case, inputs)
    q, k, v = inputs.args[:3]
    if case.spec.page_layout == "HND":
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert_base2_close(case, inputs, out, lse)
    if case.custom_mask:
        packed = plan_ragged(wrapper, case, inputs, packed=True)
        np.testing.assert_array_equal(wrapper.run_return_lse(q, k, v, planned=packed)[0], out)


def test_mask_of_bits_is_taken_in_place_of_one_of_bools():
    case = prefill_case("both", custom_mask=True)
    inputs = numbers(case)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None)
    (packed,) = masks(case, inputs, packed=True).values()
    _, _, _, table, lens, starts = inputs.args
    lists = (starts, *page_lists(table, lens, 16))
    arguments = {"custom_mask": np.zeros(1, bool), "packed_custom_mask": packed, "q_data_type": "float32"}
    plan = wrapper.plan(*lists, 6, 2, 16, 16, **arguments)
    np.testing.assert_array_equal(plan.custom_mask, inputs.kwargs["custom_mask"])


def buffer(size, dtype=jnp.int32):
    return jax.ShapeDtypeStruct((size,), dtype)


def test_graph_prefill_replays_smaller_batches_without_compiling():
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        None, "NHD", True, buffer(4), buffer(4), buffer(20), buffer(3), buffer(100, jnp.uint8), buffer(4)
    )
    step = jax.jit(lambda q, cache, planned: wrapper.run(q, cache, planned=planned, return_lse=True))
    lengths = [((5, 2, 9), (20, 2, 30)), ((1, 8), (1, 44)), ((3,), (60,)), ((0, 6, 0), (0, 60, 9))]
    batches = []
    for q_lens, kv_lens in lengths:
        rows = 3 - len(q_lens)
        case = prefill_case(
            "replay", q_lens=q_lens, kv_lens=kv_lens, page_size=4, custom_mask=True, padding_rows=rows,
            padding_tokens=16 - sum(q_lens),
        )  # fmt: skip
        inputs = numbers(case)
        whole = [np.full((30, 4, 2, 16), np.nan, np.float32) for _ in range(2)]
        for to, pages in zip(whole, inputs.args[1:3], strict=True):
            to[: len(pages)] = pages
        batches.append((case, inputs, tuple(map(jnp.asarray, whole))))

    def replay(case, inputs, cache):
        return step(inputs.args[0], cache, plan_paged(wrapper, case, inputs))

    replay(*batches[0])
    with compilations() as compiled:
        answers = [replay(*batch) for batch in batches]
    assert not compiled
    for (case, inputs, _), (out, lse) in zip(batches, answers, strict=True):
        assert_base2_close(case, inputs, out, lse)


def test_graph_ragged_prefill_replays_500_random_batches_without_compiling():
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(None, "NHD", True, buffer(4), buffer(4))
    step = jax.jit(lambda q, k, v, planned: wrapper.run(q, k, v, planned=planned, return_lse=True))
    rng, batches = np.random.default_rng(0), []
    for number in range(500):
        rows = rng.integers(1, 4) if number else 3
        q_lens = rng.integers(0, 6, rows) if number else np.full(3, 5)  # the first plan has the most queries
        lens = (q_lens, rng.integers(0, 21, rows))
        offsets = [np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in lens]
        arrays = [rng.normal(size=(rows, heads, 16)).astype(np.float32) for rows, heads in ((15, 6), (60, 2), (60, 2))]
        for array, starts in zip(arrays, (offsets[0], offsets[1], offsets[1]), strict=True):
            array[starts[-1] :] = np.nan
        batches.append((offsets, arrays))

    def replay(offsets, arrays):
        planned = wrapper.plan(*offsets, 6, 2, 16, causal=True, q_data_type="float32")
        return step(*map(jnp.asarray, arrays), planned)

    replay(*batches[0])
    with compilations() as compiled:
        answers = [replay(*batch) for batch in batches]
    assert not compiled
    for (offsets, arrays), (out, lse) in zip(batches[::25], answers[::25], strict=True):
        exact, natural = reference.ragged_extend(*arrays, *offsets, spec=SPEC, return_lse=True)
        np.testing.assert_allclose(out, exact, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse * np.float32(np.log(2)), natural, rtol=2e-5, atol=2e-5)


def test_graph_ragged_prefill_keeps_its_shapes():
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(None, "NHD", True, buffer(4), buffer(4))
    facts = (4, 2, 16)
    first = wrapper.plan([0, 2, 6, 9], [0, 4, 8, 20], *facts, causal=True)
    second = wrapper.plan([0, 3], [0, 7], *facts, causal=True)
    chex.assert_trees_all_equal_structs(first, second)
    chex.assert_trees_all_equal_shapes_and_dtypes(first, second)
    assert second.cu_q_lens.tolist() == [0, 3, 3, 3]
    assert second.cu_kv_lens.tolist() == [0, 7, 7, 7]
    with pytest.raises(ValueError, match=r"`qo_indptr` must end at 9 at most. Got qo_indptr\[-1\]=10"):
        wrapper.plan([0, 10], [0, 10], *facts, causal=True)
    with pytest.raises(ValueError, match="must have the static facts of the first"):
        wrapper.plan([0, 3], [0, 7], *facts, causal=False)
    with pytest.raises(ValueError, match=r"must fit the buffers' 3 sequences. Got 4"):
        wrapper.plan([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], *facts, causal=True)


def small_plan(wrapper=None, **changes):
    wrapper = wrapper or BatchPrefillWithPagedKVCacheWrapper(None)
    lists = {
        "qo_indptr": np.array([0, 1, 3]),
        "paged_kv_indptr": np.array([0, 2, 3]),
        "paged_kv_indices": np.array([4, 1, 2]),
        "paged_kv_last_page_len": np.array([1, 4]),
    }
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 8, "page_size": 4}
    return wrapper.plan(**(lists | sizes | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qo_indptr": np.array([0, 1])}, "`qo_indptr` must have an entry more than there are sequences: 3. Got 2"),
        ({"qo_indptr": np.array([0, 3, 1])}, "`qo_indptr` must start at 0"),
        ({"paged_kv_last_page_len": np.array([1, 5])}, r"Got paged_kv_last_page_len\[1\]=5"),
        ({"custom_mask": np.zeros(12, bool)}, "`custom_mask` must be 13 bools"),
        ({"custom_mask": np.zeros(13)}, "Got custom_mask.dtype=float64, 13 values"),
        ({"packed_custom_mask": np.zeros(3, np.uint8)}, "`packed_custom_mask` must be 2 bytes"),
    ],
)
def test_plan_of_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small_plan(**changes)


def test_graph_plan_is_refused_without_a_mask_or_with_too_large_a_one():
    sizes = (buffer(3), buffer(3), buffer(8), buffer(2))
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None, "NHD", True, *sizes, buffer(1, jnp.uint8))
    with pytest.raises(ValueError, match="`custom_mask` must be given in every plan of a wrapper with `custom_mask_b"):
        small_plan(wrapper)
    with pytest.raises(ValueError, match=r"must fit `custom_mask_buf`, which holds 8 bits. Got 13"):
        small_plan(wrapper, custom_mask=np.ones(13, bool))
    with pytest.raises(ValueError, match=r"`qo_indptr_buf` must be \[batch_size \+ 1\] .*: 3. Got 4"):
        BatchPrefillWithPagedKVCacheWrapper(None, "NHD", True, buffer(4), *sizes[1:])


def test_packed_bits_are_numpys_with_each_segment_from_a_new_byte():
    bits = np.array([1, 0, 1, 1, 0, 0, 0, 1, 1, 1], bool)
    assert packbits(bits).tolist() == [0b10110001, 0b11000000]
    packed, starts = segment_packbits(bits, [0, 3, 3, 10], "little")
    assert packed.tolist() == [0b101, 0b1110001]
    assert starts.tolist() == [0, 1, 1, 2]
    with pytest.raises(ValueError, match=r"`bitorder` must be big or little. Got 'middle'"):
        packbits(bits, "middle")


def test_states_merged_are_attention_over_all_keys():
    case = prefill_case("whole", "ragged_extend", q_lens=(4,), kv_lens=(40,), causal=False)
    inputs = numbers(case)
    q, k, v = inputs.args[0], inputs.args[1][:40], inputs.args[2][:40]
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(None)
    parts = []
    for first, end in ((0, 13), (13, 13), (13, 40)):
        wrapper.plan([0, 4], [0, end - first], 6, 2, 16, q_data_type="float32")
        parts.append(wrapper.run(q, k[first:], v[first:], return_lse=True))
    (out_a, lse_a), (out_none, lse_none), (out_b, lse_b) = parts
    assert_base2_close(case, inputs, *merge_state(out_a, lse_a, out_b, lse_b))
    assert_base2_close(case, inputs, *merge_states(*(jnp.stack(x, axis=1) for x in zip(*parts, strict=True))))
    empty = merge_state(out_none, lse_none, out_none, lse_none)
    np.testing.assert_array_equal(empty[0], 0)
    np.testing.assert_array_equal(empty[1], -np.inf)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("combined", [False, True], ids=["pair", "one_array"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_append_writes_each_token_where_its_sequence_has_it(layout, combined, page_size):
    seq_lens, appended = np.array([7, 0, 5]), np.array([0, 3, 3, 7], np.int32)
    pages = -(-seq_lens // page_size)
    order = np.random.default_rng(0).permutation(20)[: pages.sum()].astype(np.int32)
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    last = np.where(pages > 0, seq_lens - page_size * (pages - 1), 0).astype(np.int32)
    lists = tuple(map(jnp.asarray, (order, indptr, last)))
    assert get_seq_lens(lists[1], lists[2], page_size).tolist() == seq_lens.tolist()
    rows, places = get_batch_indices_positions(jnp.asarray(appended), jnp.asarray(seq_lens, jnp.int32), 9)
    assert rows.tolist() == [0, 0, 0, 2, 2, 2, 2, -1, -1]
    assert places.tolist() == [4, 5, 6, 1, 2, 3, 4, 0, 0]
    # A token past its sequence's keys goes nowhere, like those of no sequence.
    rows, places = jnp.append(rows, jnp.int32(0)), jnp.append(places, jnp.int32(7))
    key, value = (jnp.asarray(np.random.default_rng(i).normal(size=(10, 2, 8)), jnp.float32) for i in range(2))
    shape = (20, page_size, 2, 8) if layout == "NHD" else (20, 2, page_size, 8)
    cache = jnp.zeros((20, 2, *shape[1:])) if combined else (jnp.zeros(shape), jnp.zeros(shape))
    new = jax.jit(append_paged_kv_cache, static_argnums=8)(key, value, rows, places, cache, *lists, layout)
    halves = [new[:, 0], new[:, 1]] if combined else new
    for pool, tokens in zip(halves, (key, value), strict=True):
        expected = np.zeros((20, page_size, 2, 8), np.float32)
        for token, (row, place) in enumerate(zip(rows[:7].tolist(), places[:7].tolist(), strict=True)):
            expected[order[indptr[row] + place // page_size], place % page_size] = tokens[token]
        np.testing.assert_array_equal(pool if layout == "NHD" else pool.swapaxes(1, 2), expected)


def test_append_stores_fp8_divided_by_its_scale():
    key = jnp.full((1, 2, 8), 3.0)
    cache = (jnp.zeros((2, 4, 2, 8), FP8), jnp.zeros((2, 4, 2, 8), FP8))
    one = jnp.zeros(1, jnp.int32)
    lists = (jnp.ones(1, jnp.int32), jnp.array([0, 1], jnp.int32), jnp.ones(1, jnp.int32))
    scale = jnp.float32(1.5)
    k_pages, v_pages = append_paged_kv_cache(key, key, one, one, cache, *lists, k_scale=scale)
    assert float(k_pages[1, 0, 0, 0]) == 2.0
    assert float(v_pages[1, 0, 0, 0]) == 3.0


def test_prefill_in_parts_merges_to_the_whole():
    """Prefix over pages and new keys as they come, merged: what engines do with the two wrappers."""
    case = prefill_case("whole", q_lens=(6, 3), kv_lens=(22, 3), page_size=4)
    inputs = numbers(case)
    q, k_pages, v_pages, table, lens, starts = inputs.args
    paged, ragged = BatchPrefillWithPagedKVCacheWrapper(None), BatchPrefillWithRaggedKVCacheWrapper(None)
    prefixes = np.array(case.kv_lens) - case.q_lens
    paged.plan(starts, *page_lists(table, prefixes, 4), 6, 2, 16, 4, q_data_type="float32")
    ragged.plan(starts, starts, 6, 2, 16, causal=True, q_data_type="float32")
    k, v = (
        np.concatenate([reference.requests.gather_pages(np.asarray(pages), np.asarray(row), int(n))[-new:]
                        for row, n, new in zip(table, lens, case.q_lens, strict=True)])
        for pages in (k_pages, v_pages)
    )  # fmt: skip
    new = ragged.run(q, jnp.asarray(k), jnp.asarray(v), return_lse=True)
    old = paged.run(q, (k_pages, v_pages), return_lse=True)
    assert_base2_close(case, inputs, *merge_state(*old, *new))
