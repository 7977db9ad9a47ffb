"""Triton's attention on the CPU: every case of the table by its interpreter, in tiles so small that there are many."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn_kernels
from jattn_kernels import AttentionSpec, make_schedule, mla_decode, paged_decode, paged_extend
from jattn_kernels.triton.attention import entry, tile_sizes
from tests.kernels.harness.case_table import CASES, assert_close, build, by_name
from tests.kernels.harness.triton_interpreter import interpreted
from tests.often import often, often_together, slow

CORE = by_name(
    "paged_decode_fp8",
    "paged_decode_giant",
    "paged_decode_tree_rope",
    "paged_decode_combined_kv_first_layers",
    "paged_extend_window_of_both_sides",
    "paged_extend_fp8_queries",
    "paged_extend_page_size_1_hnd",
    "paged_extend_alibi_and_soft_cap",
    "ragged_extend_encoder",
    "mla_decode_fp8_layers",
    "mla_extend_soft_cap_kv_start",
)
BLOCK = 16


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles of rows and of keys, and several splits, for requests as short as the table's."""

    def small(call):
        sizes, group = tile_sizes.choose_tiles(call), call.spec.group_size
        tokens = sizes.block_tokens if call.operation.endswith("decode") else max(BLOCK // group, 1)
        return dataclasses.replace(
            sizes,
            block_m=BLOCK,
            block_n=BLOCK,
            block_tokens=tokens,
            row_blocks=-(-tokens * group // BLOCK),
            workers=5,
            tiles_per_split=None if sizes.tiles_per_split is None else 2,
        )

    monkeypatch.setattr(entry, "choose_tiles", small)


def attended(case, inputs):
    face = functools.partial(
        getattr(jattn_kernels, case.operation), spec=case.spec, return_lse=True, implementation="triton"
    )
    with interpreted():
        return jax.jit(face)(*inputs.args, **inputs.options)


@pytest.mark.parametrize(
    "case",
    [*CORE, *(slow(case) for case in CASES if case not in CORE)],
    ids=lambda case: case.name,
)
def test_triton_agrees_with_the_oracle(small_tiles, case):
    inputs = build(case)
    assert_close(case, inputs, *attended(case, inputs))


@pytest.mark.parametrize(
    "case",
    often(by_name("paged_decode_giant", "paged_extend_giant"), by_name("paged_extend_giant")),
    ids=lambda case: case.name,
)
def test_tiles_as_the_rule_has_them_agree_with_the_oracle(case):
    inputs = build(case)
    assert_close(case, inputs, *attended(case, inputs))


WAYS = ("shares_keys", "asks_early", "whole_tiles")
LATENT = by_name("mla_decode_fp8_layers", "mla_decode_verify_window", "mla_extend_soft_cap_kv_start")


@pytest.mark.parametrize(
    ("way", "case"),
    often_together([(way, case) for way in WAYS for case in LATENT], list(zip(WAYS, LATENT, strict=True))),
    ids=lambda value: getattr(value, "name", value),
)
def test_latents_the_ways_of_large_batches_on_hopper_agree_with_the_oracle(small_tiles, monkeypatch, case, way):
    choose = entry.choose_tiles

    def chosen(call):
        sizes = choose(call)
        return sizes if way == "shares_keys" else dataclasses.replace(sizes, **{"whole_tiles": True, way: True})

    monkeypatch.setattr(entry, "choose_tiles", chosen)
    monkeypatch.setattr(entry, "shares_keys", lambda call, sizes: way == "shares_keys")
    inputs = build(case)
    assert_close(case, inputs, *attended(case, inputs))


SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16)


def decode_arguments(seq_lens, tokens=1, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((len(seq_lens), tokens, 4, 16))
    pages = [rng.standard_normal((40, 8, 2, 16)) for _ in range(2)]
    table = 1 + np.arange(len(seq_lens) * 10).reshape(-1, 10) % 39
    q, *pages = (jnp.asarray(array, dtype) for array in (q, *pages))
    return q, *pages, jnp.asarray(table, jnp.int32), jnp.asarray(seq_lens, jnp.int32)


def test_schedule_of_a_step_gives_what_the_call_alone_gives(small_tiles):
    arguments = decode_arguments([70, 3, 0, 41])
    with interpreted():
        facts = {"spec": SPEC, "implementation": "triton"}
        schedule = make_schedule(arguments[-1], num_tokens=1, dtype=jnp.bfloat16, page_size=8, **facts)
        with_it = paged_decode(*arguments, schedule=schedule, return_lse=True, **facts)
        without = paged_decode(*arguments, return_lse=True, **facts)
    assert schedule is not None
    assert int((schedule.work.split >= 0).sum()) > 1
    for one, other in zip(with_it, without, strict=True):
        np.testing.assert_array_equal(one, other)


def test_schedule_of_latents_gives_what_the_call_alone_gives(small_tiles):
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=24, v_head_dim=16, sm_scale=0.25)
    q, _, _, table, lens = decode_arguments([70, 3, 0, 41])
    rows = jnp.asarray(np.random.default_rng(1).standard_normal((40, 8, 24)), jnp.bfloat16)
    facts = {"spec": spec, "implementation": "triton"}
    with interpreted():
        about = {"num_tokens": 1, "dtype": jnp.bfloat16, "page_size": 8, "operation": "mla_decode"}
        schedule = make_schedule(lens, **about, **facts)
        with_it = mla_decode(q, q[..., :8], rows, table, lens, schedule=schedule, return_lse=True, **facts)
        without = mla_decode(q, q[..., :8], rows, table, lens, return_lse=True, **facts)
    assert schedule is not None
    for one, other in zip(with_it, without, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("neighbours", [slow([]), slow([5]), [80, 80, 3]])
def test_batch_invariant_results_are_the_same_to_the_bit(small_tiles, neighbours):
    spec = dataclasses.replace(SPEC, batch_invariant=True)
    run = jax.jit(functools.partial(paged_decode, spec=spec, return_lse=True, implementation="triton"))
    q, k, v, table, lens = decode_arguments([70, *[80] * 3])
    count = 1 + len(neighbours)
    lens = jnp.asarray([70, *neighbours], jnp.int32)
    with interpreted():
        alone = run(q[:1], k, v, table[:1], lens[:1])
        among = run(q[:count], k, v, table[:count], lens)
    for one, other in zip(alone, among, strict=True):
        np.testing.assert_array_equal(one[0], other[0])


def test_extend_does_not_depend_on_the_sequences_before_it(small_tiles):
    q, k, v, table, _ = decode_arguments([30, 25], tokens=20)
    q = q.reshape(-1, 4, 16)
    run = jax.jit(functools.partial(paged_extend, spec=SPEC, return_lse=True, implementation="triton"))
    with interpreted():
        both = run(q[:27], k, v, table, jnp.array([30, 25], jnp.int32), jnp.array([0, 7, 27], jnp.int32))
        alone = run(q[7:27], k, v, table[1:], jnp.array([25], jnp.int32), jnp.array([0, 20], jnp.int32))
    for one, other in zip(both, alone, strict=True):
        np.testing.assert_array_equal(one[7:], other)


def test_schedule_of_other_tiles_than_float32_queries_need_is_made_anew():
    q, k, v, table, lens = decode_arguments([30, 25], tokens=20, dtype=jnp.float32)
    k, v = (pages.astype(jnp.float8_e4m3fn) for pages in (k, v))
    q, offsets = q.reshape(-1, 4, 16)[:27], jnp.array([0, 7, 27], jnp.int32)
    facts = {"spec": SPEC, "implementation": "triton"}
    with interpreted():
        about = {"num_tokens": 27, "dtype": jnp.float32, "kv_dtype": k.dtype, "page_size": 8, **facts}
        schedule = make_schedule(lens, offsets, **about)
        with_it = paged_extend(q, k, v, table, lens, offsets, schedule=schedule, return_lse=True, **facts)
        without = paged_extend(q, k, v, table, lens, offsets, return_lse=True, **facts)
    for one, other in zip(with_it, without, strict=True):
        np.testing.assert_array_equal(one, other)
