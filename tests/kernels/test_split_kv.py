"""What decode does around its kernel: tile sizes that fit, queries as sums of fp8 numbers, parts merged."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.lowering.fp8_parts import in_parts
from jattn_kernels.lowering.split_schedule import DecodeSchedule
from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.common.fp8_queries import split_queries, supports
from jattn_kernels.mosaic.sm90.common.merge_splits import SplitResults, merge_splits
from jattn_kernels.mosaic.sm90.decode.tile_sizes import choose_decode_tiles, turns_values
from tests.kernels.harness.interpreter import interpreted
from tests.often import often_together, slow

_SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)


@pytest.mark.parametrize(("head_dim", "rope_theta"), [(64, None), (80, None), (128, None), (128, 1e4), (256, None)])
def test_some_tiles_fit_for_every_group_and_number_of_tokens(head_dim, rope_theta):
    for group, kv_itemsize, num_tokens in itertools.product((1, 5, 8, 32), (1, 2), (1, 2, 6, 16)):
        spec = AttentionSpec(num_q_heads=group, num_kv_heads=1, head_dim=head_dim, rope_theta=rope_theta)
        sizes = choose_decode_tiles(spec, kv_itemsize, num_tokens)
        assert sizes.block_rows % 8 == 0
        assert sizes.stages >= max(2, sizes.warpgroups)
        assert sizes.stages % sizes.warpgroups == 0
        assert sizes.blocks_per_sm * sizes.shared_memory_bytes(spec, kv_itemsize) <= tiles.SHARED_MEMORY_BYTES


@pytest.mark.parametrize(
    ("facts", "num_tokens", "kv_itemsize", "arrangement"),
    [
        ({}, 1, 1, (3, 2, 1)),
        ({}, 1, 2, (3, 2, 1)),
        ({"num_q_heads": 32}, 4, 1, (3, 2, 1)),  # 16 rows
        ({"num_q_heads": 32}, 5, 1, (8, 1, 2)),
        ({"head_dim": 192, "v_head_dim": 128}, 1, 1, (3, 2, 1)),
        ({"head_dim": 256}, 1, 1, (2, 1, 2)),
        ({"head_dim": 64}, 1, 1, (9, 1, 3)),
        ({"rope_theta": 1e4}, 1, 1, (8, 1, 2)),
    ],
    ids=str,
)
def test_two_blocks_share_an_sm_where_one_warpgroup_keeps_up(facts, num_tokens, kv_itemsize, arrangement):
    spec = AttentionSpec(**{"num_q_heads": 8, "num_kv_heads": 8, "head_dim": 128} | facts)
    sizes = choose_decode_tiles(spec, kv_itemsize, num_tokens)
    assert (sizes.stages, sizes.blocks_per_sm, sizes.warpgroups) == arrangement
    assert turns_values(spec, kv_itemsize, sizes.block_rows) == (kv_itemsize == 1 and sizes.blocks_per_sm == 2)


@pytest.mark.parametrize(
    ("q_dtype", "dtype", "parts"),
    [
        ("bfloat16", "float8_e4m3fn", 2),
        ("float16", "float8_e4m3fn", 3),
        ("bfloat16", "float8_e5m2", 3),
        ("float8_e4m3fn", "float8_e5m2", 2),
        ("float8_e5m2", "float8_e4m3fn", 1),
        ("float8_e4m3fn", "float8_e4m3fn", 1),
    ],
)
@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
def test_the_parts_of_queries_sum_to_them(q_dtype, dtype, parts, size):
    q = (jax.random.normal(jax.random.key(0), (3, 2, 8, 64)) * size).astype(q_dtype)
    q = q.at[1].set(0)
    split, sizes = jax.jit(in_parts, static_argnames=("dtype", "spec"))(q, dtype=jnp.dtype(dtype), spec=_SPEC)
    assert [part.dtype for part in split] == [jnp.dtype(dtype)] * parts
    total = np.sum([np.asarray(part, np.float64) for part in split], axis=0).reshape(3, 2, 2, -1)
    exact = np.asarray(q, np.float64).reshape(3, 2, 2, -1)
    largest = np.abs(exact).max(axis=(1, 3), keepdims=True)
    error = np.abs(total * np.asarray(sizes, np.float64)[:, None, :, None] - exact)
    assert (error <= 2.0**-16 * largest).all()


SPLIT = [
    ("bfloat16", "float8_e4m3fn", (8, 2, 64)),
    ("float16", "float8_e5m2", (8, 2, 128)),
    ("bfloat16", "float8_e5m2", (2, 2, 256)),
]
FACTORS = (6, 1, None)


@pytest.mark.parametrize(
    ("q_dtype", "dtype", "heads", "factors"),
    often_together(
        [(*case, factors) for case in SPLIT for factors in FACTORS],
        [(*case, factors) for case, factors in zip(SPLIT, FACTORS, strict=True)],
    ),
)
def test_one_kernel_splits_queries_as_xla_does(q_dtype, dtype, heads, factors):
    num_q_heads, num_kv_heads, head_dim = heads
    spec = AttentionSpec(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    spread = jnp.array([1e-6, 1.0, 3e3, 0.0, 1e-45, 60.0])[:, None, None]
    q = (jax.random.normal(jax.random.key(0), (6, num_q_heads, head_dim)) * spread).astype(q_dtype)
    factor = None if factors is None else jax.random.uniform(jax.random.key(1), (factors, num_kv_heads)) - 0.5
    assert supports(q.dtype, dtype, spec)
    with interpreted():
        got, got_size = split_queries(q, jnp.dtype(dtype), factor, spec)
    parts, size = in_parts(q[:, None], jnp.dtype(dtype), spec)
    for part, expected in enumerate(parts):
        np.testing.assert_array_equal(got[:, part], expected[:, 0])
    np.testing.assert_array_equal(got_size, size if factor is None else size * factor)


@pytest.mark.parametrize("largest", [2e-38, 2.0**-101, 2.9e38])
def test_queries_of_any_size_have_finite_parts(largest):
    q = jnp.full((1, 1, 8, 64), largest, jnp.bfloat16)
    split, sizes = jax.jit(in_parts, static_argnames=("dtype", "spec"))(q, dtype=jnp.dtype("float8_e4m3fn"), spec=_SPEC)
    total = np.sum([np.asarray(part, np.float64) for part in split], axis=0) * float(sizes[0, 0])
    np.testing.assert_allclose(total, np.asarray(q, np.float64), rtol=2.0**-16, atol=2.0**-110)


def merged(outs, lses, *, num_seqs, end=None, batch_invariant=False):
    """The last of `num_seqs` sequences out of its parts, of which those from `end` on are not its own."""
    parts = SplitResults(jnp.zeros((num_seqs, 1, 8, 64)), jnp.ones((num_seqs, 1, 8)), jnp.array(outs), jnp.array(lses))
    split = np.full((num_seqs, 3), -1, np.int32)
    split[0] = num_seqs - 1, 0, len(outs) if end is None else end
    schedule = DecodeSchedule(
        work_tiles=jnp.zeros((len(outs), 5), jnp.int32),
        workers=jnp.zeros((1, 7), jnp.int32),
        split=jnp.array(split),
        block_kv=64,
    )
    with interpreted():
        return jax.jit(functools.partial(merge_splits, batch_invariant=batch_invariant))(parts, schedule)


def random_parts(num_parts):
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((num_parts, 1, 8, 64), np.float32)
    lses = rng.standard_normal((num_parts, 1, 8)).astype(np.float32) * 3
    lses[4] = -np.inf
    return outs, lses


@pytest.mark.parametrize(("num_seqs", "num_parts", "end"), [(2, 21, 21), slow(1, 21, 21), slow(1, 21, 6), (1, 60, 60)])
def test_many_parts_of_a_sequence_are_merged_by_their_weights(num_seqs, num_parts, end):
    outs, lses = random_parts(num_parts)
    outs[end:], lses[end:] = np.nan, np.nan
    out, lse = merged(outs, lses, num_seqs=num_seqs, end=end)
    outs, lses = outs[:end], lses[:end]
    total = np.logaddexp.reduce(lses.astype(np.float64), axis=0)
    np.testing.assert_allclose(lse[-1], total, rtol=1e-6)
    np.testing.assert_allclose(out[-1], (np.exp(lses - total)[..., None] * outs).sum(axis=0), atol=1e-6)
    np.testing.assert_array_equal(out[:-1], 0.0)  # the other sequence is as it was
    np.testing.assert_array_equal(lse[:-1], 1.0)


def test_parts_are_merged_alike_alone_where_results_must_not_depend_on_the_batch():
    alone, beside = (merged(*random_parts(14), num_seqs=n, batch_invariant=True) for n in (1, 2))
    for one, other in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(one[-1], other[-1])
