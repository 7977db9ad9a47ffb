"""The Hopper extend kernel on the CPU: against the oracle under the interpreter, and lowered for CUDA."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.call import AttentionOptions
from jattn_kernels.mosaic.sm90.extend import entry as extend
from jattn_kernels.mosaic.sm90.extend.dtypes import ExtendDtypes
from jattn_kernels.mosaic.sm90.extend.entry import make_schedule, paged_extend, ragged_extend
from jattn_kernels.mosaic.sm90.extend.schedule import (
    ExtendSchedule,
    ExtendTiles,
    choose_extend_tiles,
    heads_per_tile,
    is_own,
)
from jattn_kernels.mosaic.sm90.extend.work_tile import TileRows, WorkTile
from tests.kernels.harness.case_table import assert_close, build
from tests.kernels.harness.chunked_prompt import chunked_prompt, prompt_behind
from tests.kernels.harness.extend_calls import (
    DTYPES,
    FEATURES,
    FP8_WIDTHS,
    INTERPRETED,
    NAMES_OF_SCALES,
    SLOW,
    WIDTHS,
    attend,
    interpreted_in_few_blocks,
    lower_for_cuda,
)
from tests.kernels.harness.mosaic_calls import run, schedule_call
from tests.often import often, slow


@pytest.fixture
def interpreter():
    with interpreted_in_few_blocks():
        yield


# What the other interpreted ones have is in these, or in test_extend_prepass, test_key_rotation or test_window_pages.
OFTEN = (
    "long_query_more_tiles_than_stages",
    "chunk_kv_start",
    "mask_window_q_positions",
    "ragged_invariant",
    "fp8",
    "fp8_queries_dim_128",
)


@pytest.mark.parametrize(
    "case",
    often([*INTERPRETED, *SLOW], [case for case in INTERPRETED if case.name in OFTEN]),
    ids=lambda case: case.name,
)
def test_mosaic_extend_agrees_with_the_oracle_without_races(interpreter, case):
    inputs = build(case)
    out, lse = attend(case, inputs)
    assert_close(case, inputs, out, lse)


@pytest.mark.parametrize("window_left", [None, 300])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_rows_that_must_not_depend_on_others_have_all_tiles_masked(batch_invariant, window_left):
    spec = AttentionSpec(
        num_q_heads=1, num_kv_heads=1, head_dim=64, batch_invariant=batch_invariant, window_left=window_left
    )
    work_tile = WorkTile(
        query_block=0, heads=0, sequence=0, first=0, tokens=32, end_tile=5, limit=600, kv_len=632, first_tile=2
    )
    ranges = None if window_left is None else (2, 3, 4, 5)
    rows = TileRows(
        spec=spec,
        block_kv=128,
        tile_tokens=16,
        work_tile=work_tile,
        tokens=jnp.int32(16),
        limit=jnp.int32(600),
        ranges=ranges,
    )
    seen = {what for what, first, end in rows.spans() if what != "skip" and first < end}
    assert seen == ({"masked"} if batch_invariant else {"masked", "whole"})


@pytest.mark.parametrize("kv_dtype", [slow("bfloat16"), "float8_e4m3fn"])
def test_mosaic_extend_of_a_prompt_is_the_same_to_the_bit_in_chunks_beside_another(interpreter, monkeypatch, kv_dtype):
    sizes = ExtendTiles(block_kv=64, k_stages=2, v_stages=2, converted_stages=2, blocks=1)
    monkeypatch.setattr(extend, "choose_extend_tiles", lambda *facts: sizes)
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=64, batch_invariant=True, window_left=40)
    prompt = chunked_prompt(spec, num_tokens=80, cut=33, kv_dtype=kv_dtype)
    whole = run(paged_extend, "paged_extend", prompt.whole, AttentionOptions(), spec, 16)
    chunked = run(paged_extend, "paged_extend", prompt.chunked, AttentionOptions(), spec, 16)
    for alone, beside in zip(whole, chunked, strict=True):
        np.testing.assert_array_equal(alone, beside[prompt.tokens])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", slow("float8_e4m3fn")])
def test_mosaic_extend_over_ragged_keys_is_the_same_to_the_bit_behind_another(interpreter, monkeypatch, kv_dtype):
    sizes = ExtendTiles(block_kv=64, k_stages=2, v_stages=2, converted_stages=2, blocks=1)
    monkeypatch.setattr(extend, "choose_extend_tiles", lambda *facts: sizes)
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=64, batch_invariant=True)
    prompt = prompt_behind(spec, num_tokens=150, kv_dtype=kv_dtype)
    alone = run(ragged_extend, "ragged_extend", prompt.whole, AttentionOptions(), spec)
    behind = run(ragged_extend, "ragged_extend", prompt.chunked, AttentionOptions(), spec)
    chex.assert_trees_all_equal(alone, tuple(x[prompt.tokens] for x in behind))


# The values that no case with a feature has below.
@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size", "page_layout", "group_size", "causal"),
    [
        ("float16", 128, 32, "HND", 5, False),
        slow("bfloat16", 256, 128, "NHD", 128, True),
        slow("float16", 64, 64, "HND", 8, False),
    ],
)
def test_mosaic_extend_lowers_for_cuda(dtype, head_dim, page_size, page_layout, group_size, causal):
    assert "mosaic_gpu" in lower_for_cuda(dtype, head_dim, page_size, page_layout, group_size, causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
@pytest.mark.parametrize("group_size", [1, 4, 5, 8, 128])
def test_mosaic_extend_lowers_for_cuda_in_every_combination(dtype, head_dim, page_size, page_layout, group_size):
    assert "mosaic_gpu" in lower_for_cuda(dtype, head_dim, page_size, page_layout, group_size)


@pytest.mark.parametrize(
    ("feature", "head_dim", "value_dim", "page_size", "group_size"),
    [
        slow("chunk", 256, 256, 256, 1),
        ("all", 192, 128, 64, 8),
        slow("invariant", 64, 128, 256, 128),
        slow("chunk", 128, 128, None, 4),
        slow("rope", 128, 128, 16, 4),
        slow("rope_window_alibi", 64, 64, None, 5),
        slow("window", 80, 80, 16, 7),
        slow("custom_mask", 96, 80, 8, 5),
        slow("alibi", 80, 128, None, 4),
    ],
)
def test_mosaic_extend_lowers_for_cuda_with_features(feature, head_dim, value_dim, page_size, group_size):
    lowered = lower_for_cuda(
        "bfloat16", head_dim, page_size, "NHD", group_size, value_dim=value_dim, **FEATURES[feature]
    )
    assert "mosaic_gpu" in lowered


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "head_dim", "value_dim", "page_size"),
    [
        slow("bfloat16", "float8_e4m3fn", 128, 128, 16),
        slow("float16", "float8_e5m2", 64, 128, 128),
        slow("float16", "float8_e5m2", 256, 256, 8),
        slow("float8_e5m2", "float8_e4m3fn", 192, 64, 64),
        ("float8_e4m3fn", "float8_e4m3fn", 128, 128, None),
    ],
)
def test_mosaic_extend_lowers_for_cuda_with_fp8(q_dtype, kv_dtype, head_dim, value_dim, page_size):
    theta = 1e4 if head_dim == 128 and page_size else None
    facts = {"kv_dtype": kv_dtype, "value_dim": value_dim, "options": NAMES_OF_SCALES, "rope_theta": theta}
    assert "mosaic_gpu" in lower_for_cuda(q_dtype, head_dim, page_size, "HND", 4, **facts, given=True)


@pytest.mark.slow
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), DTYPES[1:])
@pytest.mark.parametrize(("head_dim", "value_dim"), FP8_WIDTHS)
def test_mosaic_extend_lowers_for_cuda_with_fp8_of_every_dtype_and_width(q_dtype, kv_dtype, head_dim, value_dim):
    # Features, groups and page sizes are spread over them.
    number = len(DTYPES) * FP8_WIDTHS.index((head_dim, value_dim)) + DTYPES.index((q_dtype, kv_dtype))
    features = {name: facts for name, facts in FEATURES.items() if name != "combined" or head_dim == value_dim}
    facts = {"kv_dtype": kv_dtype, "value_dim": value_dim, **list(features.values())[number % len(features)]}
    page_size = (8, 16, 64 if "combined_pool" in facts else None, 128, 256)[number % 5]
    group_size, page_layout = (1, 4, 5, 8, 128)[number // 5 % 5], ("NHD", "HND")[number % 2]
    assert "mosaic_gpu" in lower_for_cuda(q_dtype, head_dim, page_size, page_layout, group_size, **facts)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("head_dim", "value_dim"), WIDTHS)
def test_mosaic_extend_lowers_for_cuda_with_every_feature(feature, head_dim, value_dim):
    if feature == "combined" and head_dim != value_dim:
        pytest.skip("one pool has one width")
    if feature.startswith("rope") and head_dim % 64:
        pytest.skip("not turned")
    # Each feature with each group and page size, spread over the widths.
    number = (list(FEATURES).index(feature) + WIDTHS.index((head_dim, value_dim))) % 5
    group_size = (1, 4, 5, 8, 128)[number]
    page_size = (8, 16, None if feature != "combined" else 64, 128, 256)[number]
    facts = (("bfloat16", "float16")[number % 2], head_dim, page_size, ("NHD", "HND")[number % 2])
    assert "mosaic_gpu" in lower_for_cuda(*facts, group_size, value_dim=value_dim, **FEATURES[feature])


def test_heads_per_tile_leaves_few_rows_empty():
    assert [heads_per_tile(group) for group in (1, 4, 5, 7, 8, 33, 64, 71, 128)] == [1, 4, 5, 7, 8, 3, 32, 1, 32]


@pytest.mark.parametrize(("head_dim", "value_dim"), WIDTHS)
@pytest.mark.parametrize("theta", [None, 1e4])
def test_chosen_tiles_fit_with_as_many_keys_as_a_schedule_expects(head_dim, value_dim, theta):
    spec = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=head_dim, v_head_dim=value_dim, rope_theta=theta)
    for q_dtype, kv_dtype in DTYPES if (head_dim, value_dim) in FP8_WIDTHS else DTYPES[:1]:
        dtypes = ExtendDtypes.of(q_dtype, kv_dtype, spec)
        sizes = choose_extend_tiles(spec, dtypes)
        assert [sizes.refuses(spec, dtypes, page_size) for page_size in (8, 256)] == [None, None]
        call = schedule_call("paged_extend", spec, 9, kv_dtype)
        lens, offsets = jnp.array([9], jnp.int32), jnp.array([0, 9])
        schedule = jax.eval_shape(functools.partial(make_schedule, call, max_seq_len=None), lens, offsets)
        assert schedule.block_kv == sizes.block_kv


@pytest.mark.parametrize(
    ("sizes", "page_size", "message"),
    [
        (ExtendTiles(block_kv=128, k_stages=4, v_stages=3), 16, "bytes of shared memory"),
        (ExtendTiles(block_kv=96, k_stages=2, v_stages=2), 16, "multiple of 64 keys"),
        (ExtendTiles(block_kv=128, k_stages=2, v_stages=2), 48, "pages of 48"),
    ],
)
def test_tiles_refuse_what_would_not_compile(sizes, page_size, message):
    spec = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=128)
    assert message in sizes.refuses(spec, ExtendDtypes.of("bfloat16", "bfloat16", spec), page_size)


@pytest.mark.parametrize(
    ("facts", "given", "own"),
    [
        ({}, (), False),
        ({}, ("kv_start", "alibi_slopes"), False),
        ({}, ("q_start",), True),
        ({}, ("custom_mask",), True),
        ({"causal": False}, ("q_start", "q_positions"), False),
        ({"causal": False}, ("q_positions", "alibi_slopes"), True),
        ({"causal": False, "window_right": 3}, ("q_start",), True),
        ({"chunk_size": 8}, ("kv_start",), True),
        ({"window_left": 8}, ("kv_start",), False),
    ],
    ids=str,
)
def test_extend_makes_its_own_schedule_where_lengths_alone_do_not_tell(facts, given, own):
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=64, **facts)
    assert is_own(spec, AttentionOptions(**dict.fromkeys(given, jnp.zeros(1)))) == own


def schedule_of(q_lens, kv_lens, num_tokens, **facts):
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=64, **facts)
    lens, offsets = (jnp.asarray(values, jnp.int32) for values in (kv_lens, [0, *np.cumsum(q_lens)]))
    call = schedule_call("paged_extend", spec, num_tokens, "bfloat16")
    schedule = jax.jit(make_schedule, static_argnums=0)(call, lens, offsets, None)
    assert isinstance(schedule, ExtendSchedule)
    return schedule


@pytest.mark.parametrize("window_left", [None, 200])
def test_schedule_covers_every_token_once_longest_first(window_left):
    num_tokens = 91
    schedule = schedule_of([1, 0, 70, 9], [500, 3, 70, 0], num_tokens, window_left=window_left)
    query_blocks = np.asarray(schedule.query_blocks)
    covered = np.concatenate([np.arange(first, first + tokens) for _, first, tokens, *_ in query_blocks])
    np.testing.assert_array_equal(np.sort(covered), np.arange(num_tokens))
    first_tiles = 0 if window_left is None else query_blocks[:, 6]
    key_tiles = query_blocks[:, 3] - first_tiles
    np.testing.assert_array_equal(key_tiles, np.sort(key_tiles)[::-1])
    assert query_blocks[0, 3] == -(-500 // schedule.block_kv)
    for token, place in enumerate(np.asarray(schedule.place)):
        assert query_blocks[place // schedule.block_tokens, 1] + place % schedule.block_tokens == token


@pytest.mark.parametrize(
    ("facts", "query_block", "tiles"),
    [
        # 32 tokens at 968 .. 999, 16 a tile of rows; 128 keys a tile of keys.
        ({"window_left": 300}, (5, 8), [[5, 6, 7, 8], [5, 6, 7, 8]]),
        ({"window_left": 970}, (0, 8), [[0, 1, 7, 8], [0, 1, 7, 8]]),
        ({"chunk_size": 984}, (0, 8), [[0, 0, 7, 8], [7, 8, 8, 8]]),
        ({"causal": False, "window_left": 10, "window_right": 0}, (7, 8), [[7, 8, 8, 8], [7, 8, 8, 8]]),
    ],
)
def test_schedule_skips_tiles_that_no_row_sees_and_knows_those_that_all_see(facts, query_block, tiles):
    schedule = schedule_of([32], [1000], 32, **facts)
    np.testing.assert_array_equal(schedule.query_blocks[0, np.array([6, 3])], query_block)
    np.testing.assert_array_equal(schedule.rows.ranges[0], tiles)
