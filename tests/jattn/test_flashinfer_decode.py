"""FlashInfer's decode wrappers agree with the oracle, plan on the host, and replay without compiling."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from jattn_kernels.call import Device
from tests.jattn.harness.compile_log import compilations
from tests.jattn.harness.flashinfer_calls import SPEC, assert_base2_close, facts, numbers, page_lists, scales
from tests.kernels.harness.case import Case

FP8 = "float8_e4m3fn"


def decode_case(name, *, kv_lens=(37, 1, 130, 64), page_size=16, **options):
    spec = {key: options.pop(key) for key in list(options) if key in {f.name for f in dataclasses.fields(SPEC)}}
    return Case(
        name=name,
        operation="paged_decode",
        spec=dataclasses.replace(SPEC, **spec),
        q_lens=(1,) * len(kv_lens),
        kv_lens=kv_lens,
        page_size=page_size,
        **options,
    )


CASES = [
    decode_case("page_1", page_size=1, kv_lens=(5, 1, 70)),
    decode_case("one_array", combined_pool="pages_first"),
    decode_case("one_array_hnd", combined_pool="pages_first", page_layout="HND"),
    decode_case("rows_without_pages", padding_rows=2),
    decode_case("layers_soft_cap", num_layers=3, layer_index=1, logits_soft_cap=3.0, sm_scale=0.9),
    decode_case("own_key_only", window_left=0, page_size=1, kv_lens=(3, 9)),
    decode_case("alibi_page_64", alibi=True, page_size=64),
    decode_case("rope_hnd", rope_theta=1e4, page_layout="HND"),
    decode_case("rope_scaled", rope_theta=5e5, rope_scale=4.0, window_left=40),
    decode_case("bfloat16", dtype="bfloat16"),
    decode_case("float16", dtype="float16"),
    decode_case("fp8_pages_by_head", dtype="bfloat16", kv_dtype="float8_e5m2", kv_scale="heads"),
    decode_case("fp8_all", dtype=FP8, kv_dtype=FP8, q_scale="scalar", kv_scale="scalar"),
]


def planned_for(wrapper, case, inputs):
    lists = page_lists(inputs.args[3], inputs.args[4], case.page_size)
    return wrapper.plan(
        *lists, case.spec.num_q_heads, head_dim=case.spec.head_dim, page_size=case.page_size, **facts(case)
    )


def cache_of(case, inputs):
    return inputs.args[1] if case.spec.combined_pool else (inputs.args[1], inputs.args[2])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode_agrees_with_the_oracle(case):
    inputs = numbers(case)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, case.spec.page_layout)
    planned_for(wrapper, case, inputs)
    layer = {"layer_index": inputs.kwargs.get("layer_index")}
    q = inputs.args[0][:, 0]
    out, lse = wrapper.run(q, cache_of(case, inputs), **scales(inputs), return_lse=True, **layer)
    assert_base2_close(case, inputs, out, lse)
    np.testing.assert_array_equal(wrapper.run(q, cache_of(case, inputs), **scales(inputs), **layer), out)
    np.testing.assert_array_equal(wrapper.run_return_lse(q, cache_of(case, inputs), **scales(inputs), **layer)[1], lse)


GRAPH_ROWS, GRAPH_PAGES, GRAPH_PAGE_SIZE = 4, 24, 4


def graph_wrapper(**options):
    sizes = (GRAPH_ROWS + 1, GRAPH_PAGES, GRAPH_ROWS)
    return CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        None, *(jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes), **options
    )


def random_graph_case(rng):
    """Up to GRAPH_ROWS sequences, some empty, of at most GRAPH_PAGES pages."""
    rows = int(rng.integers(1, GRAPH_ROWS + 1))
    kv_lens = tuple(int(n) for n in rng.integers(0, GRAPH_PAGES * GRAPH_PAGE_SIZE // GRAPH_ROWS + 1, rows))
    return decode_case("replay", kv_lens=kv_lens, page_size=GRAPH_PAGE_SIZE, padding_rows=GRAPH_ROWS - rows)


def test_graph_decode_replays_random_batches_without_compiling():
    wrapper = graph_wrapper()
    step = jax.jit(lambda q, cache, planned: wrapper.run(q, cache, planned=planned, return_lse=True))
    rng = np.random.default_rng(0)
    pool_pages = 40

    def batch(seed):
        case = random_graph_case(rng)
        inputs = numbers(case, seed)
        # The case's pool, in a larger one of constant size.
        cache = tuple(np.full((pool_pages, *pages.shape[1:]), np.nan, np.float32) for pages in inputs.args[1:3])
        for pages, whole in zip(inputs.args[1:3], cache, strict=True):
            whole[: len(pages)] = pages
        indptr, indices, last = page_lists(inputs.args[3], inputs.args[4], GRAPH_PAGE_SIZE)
        rows = len(case.kv_lens)
        lists = (indptr[: rows + 1], indices, last[:rows])
        return case, inputs, lists, tuple(jnp.asarray(pages) for pages in cache)

    def replay(inputs, lists, cache):
        planned = wrapper.plan(
            *lists, SPEC.num_q_heads, SPEC.num_kv_heads, SPEC.head_dim, GRAPH_PAGE_SIZE, q_data_type="float32"
        )
        return step(jnp.asarray(np.asarray(inputs.args[0])[:, 0]), cache, planned)

    batches = [batch(seed) for seed in range(50)]
    replay(*batches[0][1:])
    with compilations() as compiled:
        answers = [replay(*arrays) for _, *arrays in batches]
    assert not compiled
    for (case, inputs, *_), (out, lse) in zip(batches[::5], answers[::5], strict=True):
        assert_base2_close(case, inputs, out, lse)


def test_graph_plan_that_does_not_fit_is_refused_and_keeps_the_last():
    wrapper = graph_wrapper()
    arguments = (6, 2, 16, GRAPH_PAGE_SIZE)
    fitting = wrapper.plan(np.array([0, 1]), np.array([3]), np.array([2]), *arguments, q_data_type="float32")
    too_many = np.arange(GRAPH_ROWS + 2)
    with pytest.raises(ValueError, match=r"must fit the buffers' 4 sequences and 24 pages. Got 5 sequences"):
        wrapper.plan(too_many, too_many[1:], np.ones(5, np.int32), *arguments)
    with pytest.raises(ValueError, match=r"Got 1 sequences and 25 pages"):
        wrapper.plan(np.array([0, 25]), np.arange(25), np.array([1]), *arguments)
    with pytest.raises(ValueError, match=r"must have the static facts of the first: .* Got window_left=4 after None\."):
        wrapper.plan(np.array([0, 1]), np.array([3]), np.array([2]), *arguments, window_left=4, q_data_type="float32")
    q, pages = jnp.ones((4, 6, 16)), jnp.ones((5, GRAPH_PAGE_SIZE, 2, 16))
    kept = wrapper.run(q, (pages, pages))
    np.testing.assert_array_equal(kept, wrapper.run(q, (pages, pages), planned=fitting))
    np.testing.assert_array_equal(kept[1:], 0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((5, 8, 3), r"`paged_kv_indptr_buffer` must be \[batch_size \+ 1\] and `paged_kv_last_page_len_buffer`"),
        ((5, None, 4), r"`paged_kv_indices_buffer` must be given with use_cuda_graph=True"),
        ((5, 0, 4), "no buffer empty"),
    ],
)
def test_graph_buffers_that_do_not_belong_together_are_refused(sizes, message):
    buffers = [None if size is None else np.zeros(size, np.int32) for size in sizes]
    with pytest.raises(ValueError, match=message):
        BatchDecodeWithPagedKVCacheWrapper(None, "NHD", True, False, *buffers)


LISTS = {"indptr": np.array([0, 2, 3]), "indices": np.array([4, 1, 2]), "last_page_len": np.array([1, 4])}


def small_plan(wrapper=None, **changes):
    wrapper = wrapper or BatchDecodeWithPagedKVCacheWrapper(None)
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 4, "q_data_type": "float32"}
    return wrapper.plan(**(LISTS | sizes | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indptr": np.array([1, 2, 3])}, "`indptr` must start at 0 and never fall"),
        ({"indptr": np.array([0, 2, 1])}, "`indptr` must start at 0 and never fall"),
        ({"indptr": np.array([0])}, r"`indptr` must be integers \[batch_size \+ 1\]"),
        ({"indptr": np.array([0.0, 1.0])}, r"Got indptr.shape=\(2,\), indptr.dtype=float64"),
        ({"indices": np.array([4, 1])}, r"`indices` must have indptr\[-1\] = 3 entries"),
        ({"indices": np.array([4, -1, 2])}, "`indices` must hold pages of at least 0. Got -1"),
        ({"last_page_len": np.array([1])}, r"`last_page_len` must be \[batch_size=2\]"),
        ({"last_page_len": np.array([1, 0])}, r"must be in 1 .. page_size=4 .* Got last_page_len\[1\]=0"),
        ({"last_page_len": np.array([5, 1])}, r"Got last_page_len\[0\]=5"),
        ({"page_size": 0}, "`page_size` must be a whole number of at least 1"),
        ({"num_qo_heads": 3}, "must be a multiple of `num_kv_heads`"),
        ({"pos_encoding_mode": "SINE"}, "`pos_encoding_mode` must be one of NONE, ROPE_LLAMA, ALIBI. Got 'SINE'"),
        ({"window_left": -2}, "`window_left` must be a whole number of at least 0, or -1 .off.. Got -2"),
        ({"logits_soft_cap": -1.0}, "`logits_soft_cap` must be None"),
    ],
)
def test_plan_of_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small_plan(**changes)


def test_plan_is_refused_inside_jit():
    with pytest.raises(ValueError, match="`indptr` is read on the host: call `plan` outside jit"):
        jax.jit(lambda indptr: small_plan(indptr=indptr))(jnp.array([0, 2, 3]))


@pytest.mark.parametrize(
    ("types", "planned"),
    [
        ({}, ("float16", "float16")),
        ({"q_data_type": "bfloat16"}, ("bfloat16", "bfloat16")),
        ({"q_data_type": jnp.bfloat16, "kv_data_type": FP8}, ("bfloat16", FP8)),
        ({"data_type": "bfloat16"}, ("bfloat16", "bfloat16")),
        ({"data_type": FP8}, ("float16", FP8)),
        ({"q_data_type": "bfloat16", "data_type": FP8}, ("bfloat16", FP8)),
    ],
)
def test_plan_takes_its_data_types_from_three_arguments(types, planned):
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 4}
    plan = BatchDecodeWithPagedKVCacheWrapper(None).plan(**LISTS, **sizes, **types)
    assert (plan.q_dtype, plan.kv_dtype) == planned


def test_run_without_a_plan_is_refused():
    q, pages = jnp.ones((2, 4, 8)), jnp.ones((5, 4, 2, 8))
    with pytest.raises(ValueError, match="`plan` must be called before `run`"):
        BatchDecodeWithPagedKVCacheWrapper(None).run(q, (pages, pages))


def test_kept_plan_is_refused_inside_jit():
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    small_plan(wrapper)
    q, pages = jnp.ones((2, 4, 8)), jnp.ones((5, 4, 2, 8))
    with pytest.raises(ValueError, match="`planned` must be given inside jit"):
        jax.jit(lambda q: wrapper.run(q, (pages, pages)))(q)


@pytest.mark.parametrize(
    ("q", "pages", "message"),
    [
        (
            jnp.ones((3, 4, 8)),
            jnp.ones((5, 4, 2, 8)),
            r"`q` must have the planned 2 rows of float32, 4 heads of 8. Got",
        ),
        (jnp.ones((2, 4, 8), "bfloat16"), jnp.ones((5, 4, 2, 8)), r"q.dtype=bfloat16"),
        (jnp.ones((2, 4, 8)), jnp.ones((5, 4, 2, 8), "bfloat16"), "must be of the planned dtype float32"),
        (jnp.ones((2, 4, 8)), jnp.ones((5, 8, 2, 8)), "must have pages of the planned 4 tokens in layout NHD"),
        (jnp.ones((2, 4, 8)), jnp.ones((5, 4, 4, 8)), r"`paged_kv_cache\[0\]` must have num_kv_heads=2"),
    ],
)
def test_run_of_what_was_not_planned_is_refused(q, pages, message):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    small_plan(wrapper)
    with pytest.raises(ValueError, match=message):
        wrapper.run(q, (pages, pages))


def test_layout_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"`kv_layout` must be NHD or HND. Got 'DNH'"):
        BatchDecodeWithPagedKVCacheWrapper(None, "DNH")


def test_workspace_reset_changes_nothing():
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    small_plan(wrapper)
    q, pages = jnp.ones((2, 4, 8)), jnp.ones((5, 4, 2, 8))
    before = wrapper.run(q, (pages, pages))
    wrapper.reset_workspace_buffer(jnp.zeros(8), jnp.zeros(8))
    np.testing.assert_array_equal(wrapper.run(q, (pages, pages)), before)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("NHD", {}),
        ("HND", {"window_left": 6}),
        ("NHD", {"logits_soft_cap": 2.0}),
        ("NHD", {"alibi": True}),
        ("HND", {"rope_theta": 1e4}),
    ],
    ids=["plain", "window_hnd", "soft_cap", "alibi", "rope_hnd"],
)
def test_single_decode_agrees_with_the_oracle(layout, options):
    alibi = options.get("alibi", False)
    spec = dataclasses.replace(SPEC, **{name: value for name, value in options.items() if name != "alibi"})
    case = Case(name="single", operation="ragged_extend", spec=spec, q_lens=(1,), kv_lens=(75,), alibi=alibi)
    inputs = numbers(case)
    q, k, v = inputs.args[0][0], inputs.args[1][:75], inputs.args[2][:75]
    if layout == "HND":
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    taken = inspect.signature(single_decode_with_kv_cache).parameters
    given = {name: value for name, value in facts(case).items() if name in taken}
    out, lse = single_decode_with_kv_cache(q, k, v, layout, return_lse=True, **given)
    assert_base2_close(case, inputs, out[None], lse[None])
    np.testing.assert_array_equal(single_decode_with_kv_cache(q, k, v, layout, **given), out)


def test_plans_schedule_serves_a_cache_in_one_array_too(monkeypatch):
    """It is the same to the bit."""
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    given = []

    def spied(q, *arrays, schedule, **options):
        given.append(schedule)
        return q, q[..., 0]

    monkeypatch.setattr("jattn.attention.paged_call.paged_decode", spied)
    wrapper, bf16 = BatchDecodeWithPagedKVCacheWrapper(None), "bfloat16"
    plan = wrapper.plan([0, 2, 3], [4, 1, 2], [3, 16], 8, 2, 128, 16, q_data_type=bf16, kv_data_type=bf16)
    q, pages = jnp.zeros((2, 8, 128), bf16), jnp.zeros((5, 2, 16, 2, 128), bf16)
    for cache in (pages, (pages[:, 0], pages[:, 1])):
        wrapper.run(q, cache)
    assert plan.schedule is not None
    assert all(schedule is plan.schedule for schedule in given)
