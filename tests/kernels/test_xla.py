"""The `xla` implementation against the oracle, over the table of cases and at random."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import jattn_kernels
from jattn_kernels import AttentionSpec, mla_decode, paged_decode, paged_extend, ragged_extend
from jattn_kernels.lowering import rope
from jattn_kernels.reference.scores import rotate
from jattn_kernels.xla import attention, fetch, tiles
from tests.kernels.harness.case_table import CASES, assert_close, build, by_name, random_cases
from tests.often import often, often_together, slow

SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16)


OPERATIONS = (
    attention.paged_decode,
    attention.paged_extend,
    attention.ragged_extend,
    attention.mla_decode,
    attention.mla_extend,
)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that short requests take several; compiled calls do not know of it, hence the clearing."""

    def clear():
        for operation in OPERATIONS:
            operation.clear_cache()

    monkeypatch.setattr(fetch, "KEYS_PER_TILE", 8)
    monkeypatch.setattr(tiles, "MIN_TILE_ROWS", 2)
    monkeypatch.setattr(tiles, "MAX_TILE_ROWS", 4)
    clear()
    yield
    clear()


def attend(case, inputs, implementation):
    return getattr(jattn_kernels, case.operation)(
        *inputs.args, **inputs.kwargs, return_lse=True, implementation=implementation
    )


# Extend has one code for paged and for ragged keys, and what a case has is in another of the table too.
MET_ELSEWHERE = {
    "paged_extend": "alibi chunk custom_mask fp8 group_1_dim_80 kv_start kv_start_and_window plain rope sinks "
    "sinks_and_window soft_cap soft_cap_and_mask window window_and_chunk",
    "ragged_extend": "alibi bfloat16 chunk custom_mask kv_start narrow_values not_causal q_positions rope sinks "
    "soft_cap window window_of_both_sides",
    "paged_decode": "bfloat16 custom_mask group_1_dim_64 group_5 hnd kv_start layers soft_cap window",
    "mla_extend": "plain",
    "paged_decode_verify": "alibi_and_soft_cap kv_start_and_window mask_and_window rope_and_kv_start "
    "soft_cap_and_mask window_and_chunk",
}
SLOW = by_name(*(f"{prefix}_{name}" for prefix, names in MET_ELSEWHERE.items() for name in names.split()))


@pytest.mark.parametrize("case", often(CASES, [case for case in CASES if case not in SLOW]), ids=lambda case: case.name)
def test_xla_agrees_with_the_oracle(case):
    inputs = build(case)
    assert_close(case, inputs, *attend(case, inputs, "xla"))


AT_RANDOM = settings(derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@given(case=random_cases())
@settings(AT_RANDOM, max_examples=20)
def test_xla_agrees_with_the_oracle_at_random_in_many_small_tiles(small_tiles, case):
    inputs = build(case)
    assert_close(case, inputs, *attend(case, inputs, "xla"))


def test_decode_takes_pages_larger_than_a_tile_of_keys():
    case = dataclasses.replace(next(case for case in CASES if case.name == "paged_decode_giant"), page_size=128)
    inputs = build(case)
    assert_close(case, inputs, *attend(case, inputs, "xla"))


def pool_of(seed, num_pages=48, page_size=8, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shape = (num_pages, page_size, SPEC.num_kv_heads, SPEC.head_dim)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))


def queries(seed, *leading, dtype=jnp.float32):
    shape = (*leading, SPEC.num_q_heads, SPEC.head_dim)
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


TABLE = jnp.arange(1, 41, dtype=jnp.int32).reshape(2, 20)


@pytest.mark.parametrize(
    ("neighbour", "dtype"),
    often_together(
        itertools.product((0, 5, 160), (jnp.float32, jnp.bfloat16)),
        [(0, jnp.float32), (5, jnp.float32), (160, jnp.bfloat16)],
    ),
)
def test_decode_does_not_change_a_bit_with_a_longer_neighbour(small_tiles, dtype, neighbour):
    arguments = queries(0, 2, 1, dtype=dtype), *pool_of(1, dtype=dtype), TABLE
    alone = paged_decode(*arguments, jnp.array([21, 21], jnp.int32), spec=SPEC, return_lse=True)
    beside = paged_decode(*arguments, jnp.array([21, neighbour], jnp.int32), spec=SPEC, return_lse=True)
    for one, other in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(one[0], other[0])


@pytest.mark.parametrize("neighbour", [slow(7), 160])
def test_extend_does_not_change_a_bit_with_a_longer_neighbour(small_tiles, neighbour):
    arguments = queries(0, 14), *pool_of(1), TABLE
    alone = paged_extend(*arguments, jnp.array([21, 0], jnp.int32), jnp.array([0, 7, 7], jnp.int32), spec=SPEC)
    lens, offsets = jnp.array([21, neighbour], jnp.int32), jnp.array([0, 7, 14], jnp.int32)
    np.testing.assert_array_equal(paged_extend(*arguments, lens, offsets, spec=SPEC)[:7], alone[:7])


@pytest.mark.parametrize("padding", [-1, 47, 10**6])
def test_decode_does_not_read_what_pads_the_page_table(padding):
    k_pages, v_pages = (pages.at[jnp.array([0, 47])].set(jnp.nan) for pages in pool_of(1))
    arguments = queries(0, 2, 1), k_pages, v_pages
    lens = jnp.array([21, 8], jnp.int32)
    used = jnp.arange(20)[None] * 8 < lens[:, None]
    padded = paged_decode(*arguments, jnp.where(used, TABLE, padding), lens, spec=SPEC)
    np.testing.assert_array_equal(padded, paged_decode(*arguments, TABLE, lens, spec=SPEC))


def test_decode_does_not_read_pages_before_the_window():
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, window_left=9)
    pools = pool_of(1)
    lens = jnp.array([160, 150], jnp.int32)
    dropped = jnp.arange(20)[None] * 8 + 8 <= lens[:, None] - 10
    dropped_pages = tuple(pages.at[jnp.where(dropped, TABLE, 47).reshape(-1)].set(jnp.nan) for pages in pools)
    q = queries(0, 2, 1)
    whole = paged_decode(q, *pools, TABLE, lens, spec=spec)
    np.testing.assert_array_equal(paged_decode(q, *dropped_pages, TABLE, lens, spec=spec), whole)
    assert jnp.isfinite(whole).all()


def test_decode_lets_nan_of_a_visible_key_reach_the_output():
    k_pages, v_pages = pool_of(1)
    k_pages = k_pages.at[TABLE[0, 1], 2].set(jnp.nan)
    out = paged_decode(queries(0, 2, 1), k_pages, v_pages, TABLE, jnp.array([21, 8], jnp.int32), spec=SPEC)
    assert jnp.isnan(out[0]).all()
    assert jnp.isfinite(out[1]).all()


@pytest.mark.parametrize("bad", [jnp.nan, slow(jnp.inf)])
def test_value_that_is_not_finite_does_not_reach_other_sequences(small_tiles, bad):
    k_pages, v_pages = pool_of(1)
    lens, offsets = jnp.array([21, 12], jnp.int32), jnp.array([0, 7, 14], jnp.int32)
    spoilt = v_pages.at[TABLE[0, 2], 4].set(bad)  # the last key of the first sequence: hidden from its queries but one
    for call, q, others, rest in (
        (paged_decode, queries(0, 2, 7), slice(1, None), ()),
        (paged_extend, queries(0, 14), slice(7, None), (offsets,)),
    ):
        expected = call(q, k_pages, v_pages, TABLE, lens, *rest, spec=SPEC)
        out = call(q, k_pages, spoilt, TABLE, lens, *rest, spec=SPEC)
        np.testing.assert_array_equal(out[others], expected[others])
        assert not jnp.isfinite(out[: others.start]).all()


@pytest.mark.parametrize(
    "rules", [{"window_left": 2**31 - 1}, slow({"window_right": 2**31 - 1}), {"chunk_size": 2**31 - 1}]
)
def test_extend_treats_the_largest_window_as_none(rules):
    whole = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, causal=False)
    arguments = queries(0, 14), *pool_of(1), TABLE, jnp.array([21, 4], jnp.int32), jnp.array([0, 7, 14], jnp.int32)
    out = paged_extend(*arguments, spec=dataclasses.replace(whole, **rules), q_start=jnp.array([14, 0], jnp.int32))
    np.testing.assert_array_equal(out, paged_extend(*arguments, spec=whole))


def test_decode_takes_an_empty_mask_where_no_sequence_has_keys():
    arguments = queries(0, 2, 1), *pool_of(1), TABLE, jnp.zeros(2, jnp.int32)
    out, lse = paged_decode(*arguments, spec=SPEC, custom_mask=jnp.zeros(0, bool), return_lse=True)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_ragged_extend_takes_one_of_stacked_layers():
    rng = np.random.default_rng(2)
    k, v = (jnp.asarray(rng.standard_normal((3, 12, 2, 16)), jnp.float32) for _ in range(2))
    q, offsets = queries(0, 12), jnp.array([0, 5, 12], jnp.int32)
    stacked = jax.jit(lambda layer: ragged_extend(q, k, v, offsets, offsets, spec=SPEC, layer_index=layer))
    expected = ragged_extend(q, k[1], v[1], offsets, offsets, spec=SPEC)
    np.testing.assert_array_equal(stacked(jnp.int32(1)), expected)


def test_mla_decode_reads_one_of_stacked_layers_in_jit():
    rng = np.random.default_rng(2)
    latent = jnp.asarray(rng.standard_normal((3, 48, 8, 10)), jnp.float32)
    q_nope, q_pe = (jnp.asarray(rng.standard_normal((2, 1, 4, width)), jnp.float32) for width in (8, 2))
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=10, v_head_dim=8, sm_scale=0.3)
    lens = jnp.array([21, 8], jnp.int32)
    stacked = jax.jit(lambda layer: mla_decode(q_nope, q_pe, latent, TABLE, lens, spec=spec, layer_index=layer))
    expected = mla_decode(q_nope, q_pe, latent[1], TABLE, lens, spec=spec)
    np.testing.assert_array_equal(stacked(jnp.int32(1)), expected)


@pytest.mark.parametrize("first", [0, 10**6, 2**24 + 1])
def test_rope_is_as_exact_far_away_as_near(first):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 5, 2, 64)).astype(np.float32)
    position = first + np.arange(5)
    found = rope.rotate(jnp.asarray(x), jnp.asarray(position[None], jnp.int32), theta=1e4, scale=1.0)
    exact = rotate(x[0].astype(np.float64), position, 1e4, 1.0)
    # An angle is off by half a step of 2^-32 turns a position, and by a few float32 roundings.
    angle = 2 * np.pi * (first + 5) * 2.0**-33 + 8 * np.finfo(np.float32).eps
    np.testing.assert_allclose(found[0], exact, rtol=0, atol=angle * np.abs(x).max() * 2)


def test_rope_sees_distances_only_even_far_away():
    spec = dataclasses.replace(SPEC, rope_theta=5e5)
    arguments = queries(0, 2, 1), *pool_of(1), TABLE, jnp.array([160, 9], jnp.int32)
    near = paged_decode(*arguments, spec=spec)
    far = paged_decode(*arguments, spec=spec, kv_start=jnp.array([2**24, 10**6], jnp.int32))
    np.testing.assert_allclose(far, near, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("q_dtype", "out_dtype"), [("float8_e4m3fn", "bfloat16"), ("float16", "float16")])
def test_decode_of_fp8_pages_answers_in_the_dtype_of_its_queries(q_dtype, out_dtype):
    pools = (pages.astype(jnp.float8_e5m2) for pages in pool_of(1))
    out = paged_decode(queries(0, 2, 1, dtype=q_dtype), *pools, TABLE, jnp.array([21, 4], jnp.int32), spec=SPEC)
    assert out.dtype == out_dtype


def paged_memory(operation, *, num_pages, max_pages, num_tokens=32, num_seqs=4):
    """Temporary bytes of an attention in a scan over the layers of a pool."""
    pages = jax.ShapeDtypeStruct((2, num_pages, 8, SPEC.num_kv_heads, SPEC.head_dim), jnp.bfloat16)
    ints = jax.ShapeDtypeStruct((num_seqs,), jnp.int32)
    table = jax.ShapeDtypeStruct((num_seqs, max_pages), jnp.int32)

    def attend_all(q, k_pages, v_pages, table, lens, cu_q_lens):
        def layer(q, index):
            arguments = {"spec": SPEC, "layer_index": index}
            if operation == "paged_decode":
                return paged_decode(q[:, None], k_pages, v_pages, table, lens, **arguments)[:, 0], None
            return paged_extend(q, k_pages, v_pages, table, lens, cu_q_lens, **arguments), None

        return jax.lax.scan(layer, q, jnp.arange(2, dtype=jnp.int32))[0]

    rows = num_seqs if operation == "paged_decode" else num_tokens
    q = jax.ShapeDtypeStruct((rows, SPEC.num_q_heads, SPEC.head_dim), jnp.bfloat16)
    offsets = jax.ShapeDtypeStruct((num_seqs + 1,), jnp.int32)
    compiled = jax.jit(attend_all).lower(q, pages, pages, table, ints, offsets).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("operation", ["paged_decode", "paged_extend"])
def test_temporary_memory_grows_neither_with_the_context_nor_with_the_pool(operation):
    small = paged_memory(operation, num_pages=64, max_pages=16)
    assert paged_memory(operation, num_pages=64, max_pages=4096) == small
    assert paged_memory(operation, num_pages=8192, max_pages=16) == small
