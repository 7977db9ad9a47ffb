"""Decode over a shared prefix, against the oracle on each sequence as a whole."""

import dataclasses
import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec, attention, serve, shared_prefix_decode, shared_prefix_schedule
from jattn_kernels.call import Device, default_device
from jattn_kernels.mosaic.sm90.decode import split_kv as paged
from tests.kernels.harness.case_table import Case, Inputs, assert_close, build
from tests.kernels.harness.interpreter import interpreted
from tests.often import slow

PAGE_SIZE = 8
SUFFIXES = (3, 9, 2, 8)


def spec_of(**fields):
    return AttentionSpec(**{"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, **fields})


def whole(prefix_len, *, q_len=2, suffixes=SUFFIXES, padded=1, **fields):
    """The call without a shared prefix: each sequence by itself, though all begin with the same keys."""
    kv_lens = (*(prefix_len + suffix for suffix in suffixes), *[0] * padded)
    given = {"spec": spec_of(), **fields}
    case = Case(name="whole", operation="ragged_extend", q_lens=(q_len,) * len(kv_lens), kv_lens=kv_lens, **given)
    inputs = build(case)
    q, k, v, cu_q_lens, cu_kv_lens = inputs.args
    for first in cu_kv_lens[1 : len(suffixes)].tolist():
        k, v = (x.at[first : first + prefix_len].set(x[:prefix_len]) for x in (k, v))
    if padded:
        q = q.at[-q_len * padded :].set(jnp.nan)
    return case, Inputs((q, k, v, cu_q_lens, cu_kv_lens), inputs.kwargs)


def shared(case, inputs, prefix_len, *, page_size=PAGE_SIZE):
    """The arguments of `shared_prefix_decode`; NaN wherever nobody owns the memory."""
    q, k, v, cu_q_lens, cu_kv_lens = inputs.args
    batch_size = len(cu_q_lens) - 1
    bounds = cu_kv_lens.tolist()
    runs = [(0, prefix_len)]
    runs += [(min(first + prefix_len, end), end) for first, end in itertools.pairwise(bounds)]
    counts = [-(-(end - first) // page_size) for first, end in runs]
    numbers = iter(np.random.default_rng(0).permutation(sum(counts) + 2).tolist())
    pools = [np.full((sum(counts) + 2, page_size, *x.shape[1:]), np.nan, x.dtype) for x in (k, v)]
    tables = np.zeros((len(runs), max(counts) + 1), np.int32)
    for table, count, (first, end) in zip(tables, counts, runs, strict=True):
        table[:count] = [next(numbers) for _ in range(count)]
        for pool, rows in zip(pools, (np.asarray(k), np.asarray(v)), strict=True):
            for i in range(end - first):
                pool[table[i // page_size], i % page_size] = rows[first + i]
    lens = jnp.array([end - first for first, end in runs], jnp.int32)
    kwargs = dict(inputs.kwargs)
    queries = q.reshape(batch_size, -1, *q.shape[1:])
    if case.tree is not None:
        kwargs["q_positions"] = kwargs["q_positions"].reshape(batch_size, -1)
        masks, first = [], 0
        for kv_len in case.kv_lens:
            area = queries.shape[1] * kv_len
            masks.append(kwargs["custom_mask"][first : first + area].reshape(-1, kv_len)[:, prefix_len:].reshape(-1))
            first += area
        kwargs["custom_mask"] = jnp.concatenate(masks)
    k_pages, v_pages = (jnp.asarray(pool) for pool in pools)
    return (queries, k_pages, v_pages, jnp.asarray(tables[0]), lens[0], jnp.asarray(tables[1:]), lens[1:]), kwargs


def assert_agrees(case, inputs, prefix_len, **options):
    args, kwargs = shared(case, inputs, prefix_len, page_size=options.pop("page_size", PAGE_SIZE))
    names = {name: kwargs.pop(name, options.pop(name, None)) for name in ("spec", "implementation")}
    decode = jax.jit(functools.partial(shared_prefix_decode, **names, return_lse=True))
    out, lse = decode(*args, **kwargs, **options)
    assert_close(case, inputs, out.reshape(-1, *out.shape[2:]), lse.reshape(-1, lse.shape[2]))


TREE = {"q_len": 4, "suffixes": (4, 9, 6), "tree": (-1, 0, 0, 1), "padded": 0}


@pytest.mark.parametrize(
    ("prefix_len", "fields"),
    [
        (16, {}),
        (0, {}),
        (21, {"q_len": 1, "dtype": "bfloat16"}),
        (21, {"spec": spec_of(window_left=5)}),
        slow(21, {"spec": spec_of(chunk_size=8)}),
        (21, {"spec": spec_of(logits_soft_cap=2.0, sm_scale=1.0), "sinks": True}),
        (21, {"spec": spec_of(rope_theta=1e4), "alibi": True}),
        slow(21, {"spec": spec_of(causal=False, window_left=9, window_right=1)}),
        (8, {"spec": spec_of(causal=False, window_right=0), "q_len": 1, "suffixes": (3, 3, 3, 3)}),
        (16, {**TREE, "spec": spec_of(window_left=6)}),
        (16, {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "kv_scale": "heads", "q_scale": "scalar"}),
        slow(16, {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e5m2", "sinks": True}),
    ],
    ids=lambda value: "" if value == {} else str(value) if isinstance(value, int) else "-".join(value),
)
def test_shared_prefix_equals_whole_sequences(prefix_len, fields):
    assert_agrees(*whole(prefix_len, **fields), prefix_len)


def test_shared_prefix_reads_one_of_stacked_layers():
    case, inputs = whole(13)
    (q, *pools, prefix_table, prefix_len, table, lens), kwargs = shared(case, inputs, 13)
    stacked = (jnp.stack([jnp.full_like(pool, jnp.nan), pool]) for pool in pools)
    decode = jax.jit(shared_prefix_decode, static_argnames=("spec", "return_lse"))
    arguments = (q, *stacked, prefix_table, prefix_len, table, lens)
    out, lse = decode(*arguments, **kwargs, layer_index=jnp.int32(1), return_lse=True)
    assert_close(case, inputs, out.reshape(-1, *out.shape[2:]), lse.reshape(-1, lse.shape[2]))


def calls_of(monkeypatch, **options):
    """The calls that dispatch was asked about."""
    asked = []
    choose = serve.choose

    def recorded(call, implementation=None):
        asked.append(call)
        return choose(call, implementation)

    monkeypatch.setattr(serve, "choose", recorded)
    fields = {"spec": options.pop("spec", spec_of())}
    args, kwargs = shared(*whole(16, **fields), 16)
    shared_prefix_decode(*args, **kwargs | options)
    return asked


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, False),
        ({"spec": spec_of(causal=False, window_right=1)}, False),
        ({"spec": spec_of(window_left=5)}, True),
        slow({"spec": spec_of(chunk_size=8)}, True),
        ({"spec": spec_of(rope_theta=1e4)}, True),
        ({"alibi_slopes": jnp.ones(4)}, True),
    ],
    ids=str,
)
def test_prefix_pass_is_given_positions_only_where_a_rule_needs_them(monkeypatch, options, needed):
    prefix, suffix = calls_of(monkeypatch, **options)
    assert (prefix.operation, suffix.operation) == ("paged_extend", "paged_decode")
    assert ("q_positions" in prefix.features) == needed
    assert "q_positions" not in suffix.features


def test_sinks_reach_neither_pass(monkeypatch):
    assert all("sinks" not in call.features for call in calls_of(monkeypatch, sinks=jnp.zeros(4)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prefix_table": jnp.zeros((1, 3), jnp.int32)}, "`prefix_table`"),
        ({"prefix_table": [0]}, "`prefix_table`"),
        ({"q": [0.0]}, "`q`"),
        ({"q": jnp.zeros((5, 4, 16))}, r"`q` must be \[B, Q, N, H\]"),
        ({"spec": None}, "`spec`"),
        ({"schedule": 3}, "`schedule` must be None or what `shared_prefix_schedule` makes"),
        ({"q_positions": [0]}, "`q_positions`"),
        ({"q_scale": [[1.0]]}, "`q_scale`"),
        ({"page_table": [0]}, "`page_table`"),
        ({"prefix_len": jnp.zeros(1, jnp.int32)}, "`prefix_len`"),
        ({"suffix_lens": jnp.zeros(2, jnp.int32)}, "`suffix_lens`"),
        ({"sinks": jnp.zeros(2)}, "`sinks`"),
        ({"q_scale": jnp.ones((5, 2))}, r"`q_scale` must be a scalar or \[K\].* Got q_scale.shape=\(5, 2\)"),
    ],
)
def test_shared_prefix_says_what_is_wrong(change, sentence):
    names = ("q", "k_pages", "v_pages", "prefix_table", "prefix_len", "page_table", "suffix_lens")
    args, kwargs = shared(*whole(16), 16)
    # Past the type checker of the tests, which would be first to speak.
    unchecked = inspect.unwrap(shared_prefix_decode)
    with pytest.raises(ValueError, match=sentence):
        unchecked(**dict(zip(names, args, strict=True)) | kwargs | change)


def test_schedule_has_a_work_list_for_each_pass(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
    facts = {"spec": spec, "num_tokens": 1, "dtype": jnp.bfloat16, "page_size": 16}
    prefix, suffix = shared_prefix_schedule(jnp.int32(300), jnp.array([7, 40], jnp.int32), **facts)
    alone = {**facts, "spec": dataclasses.replace(spec, causal=False), "num_tokens": 2}
    expected = attention.make_schedule(jnp.array([300], jnp.int32), jnp.array([0, 2], jnp.int32), **alone)
    jax.tree.map(np.testing.assert_array_equal, prefix, expected)
    expected = attention.make_schedule(jnp.array([7, 40], jnp.int32), **facts)
    jax.tree.map(np.testing.assert_array_equal, suffix, expected)


@pytest.mark.slow  # what is done with results is XLA's above, and the two kernels have tests of their own
def test_shared_prefix_runs_on_the_hopper_kernels(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    monkeypatch.setattr(paged, "num_sms", lambda: 3)  # few parts: the interpreter is slow
    spec = spec_of(head_dim=64)
    case, inputs = whole(37, q_len=1, suffixes=(3, 20), spec=spec, dtype="bfloat16", sinks=True)
    facts = {"spec": spec, "num_tokens": 1, "dtype": jnp.bfloat16, "page_size": 16}
    schedule = shared_prefix_schedule(jnp.int32(37), jnp.array([3, 20, 0], jnp.int32), **facts)
    with interpreted():
        assert_agrees(case, inputs, 37, page_size=16, schedule=schedule, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("scheduled", [False, True])
def test_shared_prefix_on_a_gpu(implementation, q_len, scheduled):
    if implementation == "mosaic" and default_device().compute_capability != (9, 0):
        pytest.skip("only Hopper has these kernels")
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
    suffixes = (3, 130, 64, 9, 300)
    case, inputs = whole(1000, q_len=q_len, suffixes=suffixes, spec=spec, dtype="bfloat16", sinks=True)
    schedule = None
    if scheduled:
        schedule = shared_prefix_schedule(
            jnp.int32(1000),
            jnp.array([*suffixes, 0], jnp.int32),
            spec=spec,
            num_tokens=q_len,
            dtype=jnp.bfloat16,
            page_size=16,
            implementation=implementation,
        )
    assert_agrees(case, inputs, 1000, page_size=16, schedule=schedule, implementation=implementation)
