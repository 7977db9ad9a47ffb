"""Virtual batches are the chunks of the requests, and attention over them is chunked attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn.local_attention import (
    make_local_attention_virtual_batches,
    max_virtual_batches,
    pad_local_attention_virtual_batches,
)
from jattn_kernels import AttentionSpec, paged_decode, paged_extend
from jattn_kernels.call import Device
from tests.kernels.harness.extend_calls import interpreted_in_few_blocks

padded = jax.jit(pad_local_attention_virtual_batches, static_argnums=(0, 4, 5))


def offsets(lens):
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def table_of(rows, columns):
    """A page of its own for every place, none of them 0."""
    return 1 + np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)


def by_hand(chunk_size, q_lens, kv_lens, table, page_size):
    """Row after row: a virtual batch ends where the request or the chunk does. Lists of q, k and pages."""
    batches = []
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        previous = None
        for p in range(kv_len - q_len, kv_len):
            chunk = p // chunk_size if p >= 0 else "none"
            if chunk != previous:
                first = 0 if chunk == "none" else chunk * chunk_size
                keys = 0 if chunk == "none" else min(chunk_size, kv_len - first)
                columns = first // page_size + np.arange(chunk_size // page_size)
                pages = table[b, np.minimum(columns, table.shape[1] - 1)] if keys else 0 * columns
                batches.append([0, keys, pages])
            batches[-1][0] += 1
            previous = chunk
    return batches


def test_virtual_batches_of_the_worked_example():
    q_lens, kv_lens = [4, 10, 5], np.array([6, 17, 9], np.int32)
    table = np.arange(30, dtype=np.int32).reshape(3, 10)
    q_local, cu, k_local, pages = make_local_attention_virtual_batches(4, offsets(q_lens), kv_lens, table, 2)
    assert q_local.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert cu.tolist() == [0, 2, 4, 5, 9, 13, 14, 18, 19]
    assert k_local.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    assert pages.tolist() == [[0, 1], [2, 3], [12, 13], [14, 15], [16, 17], [18, 19], [22, 23], [24, 25]]
    assert {x.dtype for x in (q_local, cu, k_local, pages)} == {np.dtype(np.int32)}


@st.composite
def batches(draw):
    chunk_size, page_size = draw(st.sampled_from([(4, 1), (4, 2), (8, 4), (8, 8)]))
    requests = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 24)), min_size=4, max_size=4))
    return chunk_size, page_size, *(list(x) for x in zip(*requests, strict=True))


@given(batches(), st.integers(1, 24))
@settings(max_examples=200, derandomize=True)
def test_virtual_batches_are_the_runs_of_rows_in_one_chunk(batch, columns):
    chunk_size, page_size, q_lens, kv_lens = batch
    table, kv_lens = table_of(4, columns), np.array(kv_lens, np.int32)
    got = make_local_attention_virtual_batches(chunk_size, offsets(q_lens), kv_lens, table, page_size)
    expected = by_hand(chunk_size, q_lens, kv_lens, table, page_size)
    assert [got[0].tolist(), got[2].tolist()] == [[x[0] for x in expected], [x[1] for x in expected]]
    assert got[1].tolist() == offsets(got[0]).tolist()
    assert got[1][-1] == sum(q_lens)
    assert got[3].tolist() == [x[2].tolist() for x in expected]


@given(batches())
@settings(max_examples=100, derandomize=True)
def test_padded_virtual_batches_are_those_of_numpy_and_empty_ones(batch):
    chunk_size, page_size, q_lens, kv_lens = batch
    num_tokens = 80  # of the bucket
    table, kv_lens = table_of(4, 5), np.array(kv_lens, np.int32)
    bound = max_virtual_batches(chunk_size, 4, num_tokens)
    expected = make_local_attention_virtual_batches(chunk_size, offsets(q_lens), kv_lens, table, page_size)
    unused = bound - len(expected[0])
    assert len(expected[0]) <= max_virtual_batches(chunk_size, 4, sum(q_lens))
    got = padded(chunk_size, *(jnp.asarray(x) for x in (offsets(q_lens), kv_lens, table)), page_size, num_tokens)
    for actual, wanted, mode in zip(got, expected, ("constant", "edge", "constant", "constant"), strict=True):
        wanted = np.pad(wanted, ((0, unused), *[(0, 0)] * (wanted.ndim - 1)), mode=mode)
        np.testing.assert_array_equal(actual, wanted)
        assert actual.dtype == jnp.int32


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 9), (0, 0)])
def test_virtual_batches_of_a_request_without_queries_are_none(q_len, kv_len):
    got = make_local_attention_virtual_batches(4, offsets([q_len]), np.array([kv_len], np.int32), table_of(1, 5), 2)
    assert [x.shape for x in got] == [(0,), (1,), (0,), (0, 2)]


def test_virtual_batches_take_a_table_on_the_device():
    arguments = offsets([3]), np.array([5], np.int32)
    *_, pages = make_local_attention_virtual_batches(4, *arguments, jnp.asarray(table_of(1, 4)), 2)
    assert isinstance(pages, jax.Array)
    np.testing.assert_array_equal(pages, make_local_attention_virtual_batches(4, *arguments, table_of(1, 4), 2)[3])


@pytest.mark.parametrize(("chunk_size", "page_size"), [(4, 0), (0, 2), (6, 4), (-4, 2), (4, -2)])
def test_virtual_batches_of_chunks_that_cut_a_page_are_refused(chunk_size, page_size):
    arguments = offsets([3]), np.array([5], np.int32), table_of(1, 4)
    message = f"Got attn_chunk_size={chunk_size}, page_size={page_size}"
    with pytest.raises(ValueError, match=message):
        make_local_attention_virtual_batches(chunk_size, *arguments, page_size)
    with pytest.raises(ValueError, match=message):
        padded(chunk_size, *(jnp.asarray(x) for x in arguments), page_size, 3)


@pytest.mark.parametrize(
    ("starts", "lens", "sentence"),
    [
        (
            [0, 5, 2],
            [5, 5],
            r"`query_start_loc_np` must start at 0 and never fall\. Got query_start_loc_np=\[0, 5, 2\]",
        ),
        (
            [1, 2, 3],
            [5, 5],
            r"`query_start_loc_np` must start at 0 and never fall\. Got query_start_loc_np=\[1, 2, 3\]",
        ),
        ([0, 2, 3], [5, -5], r"`seq_lens_np` must be lengths of at least 0\. Got \[5, -5\]"),
    ],
)
def test_virtual_batches_of_lengths_below_0_are_refused(starts, lens, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_local_attention_virtual_batches(4, np.array(starts), np.array(lens), table_of(2, 4), 2)


def test_virtual_batches_of_no_tokens_are_refused():
    arguments = (jnp.asarray(x) for x in (offsets([0]), np.array([0], np.int32), table_of(1, 4)))
    with pytest.raises(ValueError, match=r"`num_tokens` must be at least 1. Got num_tokens=0"):
        pad_local_attention_virtual_batches(4, *arguments, 2, 0)


HEADS = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8}
RULES = [{}, {"window_left": 2}, {"logits_soft_cap": 2.0}]


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("rules", RULES, ids=["plain", "window", "soft_cap"])
def test_extend_over_virtual_batches_is_chunked_attention(rules):
    chunk_size, page_size, tokens = 8, 4, 40
    q_lens, kv_lens = [13, 0, 5, 4, 9], np.array([27, 12, 5, 0, 6], np.int32)
    cu, table = jnp.asarray(offsets(q_lens)), jnp.asarray(table_of(5, 7))
    q, k, v = random(0, tokens, 2, 8), random(1, 36, page_size, 1, 8), random(2, 36, page_size, 1, 8)
    extend = functools.partial(paged_extend, q, k, v, alibi_slopes=jnp.array([0.5, 0.1]), return_lse=True)
    whole = extend(table, jnp.asarray(kv_lens), cu, spec=AttentionSpec(**HEADS, **rules, chunk_size=chunk_size))
    _, cu, kv_lens, table = padded(chunk_size, cu, jnp.asarray(kv_lens), table, page_size, tokens)
    local = extend(table, kv_lens, cu, spec=AttentionSpec(**HEADS, **rules))
    for one, other in zip(whole, local, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert np.isfinite(whole[1]).any()


# Extend's own tests have chunks, and the tests above virtual batches by XLA.
@pytest.mark.slow
@pytest.mark.parametrize("rules", [{}, {"window_left": 40}], ids=["plain", "window"])
def test_hoppers_extend_over_virtual_batches_is_chunked_attention(monkeypatch, rules):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0)))
    chunk_size, page_size, tokens = 64, 16, 40
    q_lens, kv_lens = [13, 0, 5, 9], np.array([140, 12, 5, 66], np.int32)
    cu, table = jnp.asarray(offsets(q_lens)), jnp.asarray(table_of(4, 9))
    arrays = random(0, tokens, 2, 64), random(1, 37, page_size, 1, 64), random(2, 37, page_size, 1, 64)
    arrays = [x.astype(jnp.bfloat16) for x in arrays]
    spec = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=64, **rules)

    def extend(*places, spec):
        return jax.jit(functools.partial(paged_extend, spec=spec, return_lse=True))(*arrays, *places)

    with interpreted_in_few_blocks():
        whole = extend(table, jnp.asarray(kv_lens), cu, spec=dataclasses.replace(spec, chunk_size=chunk_size))
        _, cu, kv_lens, table = padded(chunk_size, cu, jnp.asarray(kv_lens), table, page_size, tokens)
        local = extend(table, kv_lens, cu, spec=spec)
        for one, other in zip(whole, local, strict=True):
            owned = np.asarray(one, np.float32)[: sum(q_lens)], np.asarray(other, np.float32)[: sum(q_lens)]
            np.testing.assert_allclose(*owned, rtol=1e-2, atol=1e-2)
            assert np.abs(owned[0]).max() > 0.1


def test_decode_over_virtual_batches_is_chunked_attention():
    kv_lens = np.array([4, 5, 0, 8, 1, 27], np.int32)
    table = jnp.asarray(table_of(6, 14))
    q, k, v = random(0, 6, 1, 2, 8), random(1, 85, 2, 1, 8), random(2, 85, 2, 1, 8)
    whole = paged_decode(q, k, v, table, jnp.asarray(kv_lens), spec=AttentionSpec(**HEADS, chunk_size=4))
    _, _, local_lens, table = padded(4, jnp.arange(7, dtype=jnp.int32), jnp.asarray(kv_lens), table, 2, 6)
    assert local_lens.tolist() == [4, 1, 0, 4, 1, 3]
    local = paged_decode(q, k, v, table, local_lens, spec=AttentionSpec(**HEADS))
    np.testing.assert_allclose(whole, local, rtol=1e-5, atol=1e-5)
    assert not whole[2].any()
