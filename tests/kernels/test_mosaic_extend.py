"""The Hopper extend kernel on the CPU: against the oracle under the interpreter, and lowered for CUDA."""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from jattn_kernels import AttentionSpec
from jattn_kernels.call import AttentionOptions
from jattn_kernels.mosaic.sm90 import extend, tiles
from jattn_kernels.mosaic.sm90.extend import paged_extend
from jattn_kernels.mosaic.sm90.extend_schedule import ExtendTiles, choose_tiles, extend_schedule, heads_per_tile
from tests.kernels.cases import CASES, assert_close, build

NAMED = {case.name.removeprefix("paged_extend_"): case for case in CASES if case.operation == "paged_extend"}


@pytest.fixture
def interpreter(monkeypatch):
    # Few blocks: the interpreter is slow, and each takes several units of work, as on a GPU.
    monkeypatch.setattr(extend, "choose_tiles", lambda spec: dataclasses.replace(choose_tiles(spec), blocks=2))
    with tiles.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


def derived(name, of="plain", *, heads=(4, 2), head_dim=64, dtype="bfloat16", **fields):
    """A case of the table in a form that the kernel takes; `fields` of the case or of its spec."""
    source = NAMED[of]
    spec_names = {field.name for field in dataclasses.fields(AttentionSpec)}
    facts = {key: fields.pop(key) for key in spec_names & fields.keys()}
    spec = dataclasses.replace(source.spec, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, **facts)
    return dataclasses.replace(source, name=name, spec=spec, dtype=dtype, **fields)


ONE = {"heads": (1, 1)}
LAYERS = {"num_layers": 2, "layer_index": 1}
LONG = {"q_lens": (40, 9, 3), "kv_lens": (300, 9, 20)}  # more tiles of keys than one
INTERPRETED = [
    derived("plain"),
    derived("not_causal_float16", of="not_causal", dtype="float16", **ONE),
    derived("positions", of="kv_start", page_size=16, **ONE),
    derived("queries_before_keys", of="queries_before_keys", **ONE),
    derived("q_start_past_the_end", of="q_start_past_the_end", **ONE),
    derived("more_queries_than_keys", of="more_queries_than_keys", **ONE),
    derived("no_queries_in_the_middle", of="no_queries_in_the_middle", custom_mask=False, **ONE),
    derived("padding", of="padding", custom_mask=False, q_positions=False, heads=(2, 1)),
    derived("giant_among_dwarfs", of="giant", page_size=32, **ONE),
    derived("long_query", q_lens=(131, 1), kv_lens=(150, 300), **ONE),
    derived("more_tiles_than_stages", q_lens=(3,), kv_lens=(700,), **ONE),
    derived("one_token", q_lens=(1,), kv_lens=(5,), **ONE),
    derived("group_5", heads=(5, 1)),
    derived("group_8", heads=(8, 1), q_lens=(11, 5, 9, 16)),
    derived("hnd_layers", heads=(2, 2), page_layout="HND", num_layers=3, layer_index=1, page_size=64),
    derived("dim_128", head_dim=128, q_lens=(9, 2), kv_lens=(140, 2), page_size=16),
    derived("dim_256", head_dim=256, q_lens=(9, 2), kv_lens=(70, 2), heads=(2, 1), page_size=128),
    derived("negative_scale", sm_scale=-0.5, q_lens=(5,), kv_lens=(13,), **ONE),
    derived("window_sinks_scales", of="sinks", window_left=70, **LONG, q_scale="rows", kv_scale="rows", **LAYERS),
    derived("window_of_both_sides_hnd", causal=False, window_left=90, window_right=20, page_layout="HND", **LONG),
    derived("chunk_kv_start", of="kv_start", chunk_size=100, **LONG, kv_start=(5, 40, 0), q_start=(250, 44, 17)),
    derived("alibi_soft_cap", of="alibi", logits_soft_cap=5.0, q_lens=(70, 3), kv_lens=(140, 9), q_start=(60, 6)),
    derived("alibi_not_causal_window", of="alibi", causal=False, window_left=40, page_size=16, **LONG),
    derived("q_positions_alibi", of="q_positions", alibi=True, sm_scale=-0.5, padding_rows=1, padding_tokens=2),
    derived("mask_window_q_positions", of="padding", window_left=130, kv_lens=(150, 1, 0, 70), q_lens=(9, 1, 3, 20)),
    derived("tree_dim_192_128", of="tree", head_dim=192, v_head_dim=128, heads=(8, 1), window_left=20),
    derived("combined_page_256", **LAYERS, combined_pool="pages_first", page_size=256, **LONG),
    derived("dim_64_128_soft_cap", v_head_dim=128, logits_soft_cap=5.0, **ONE),
]
SLOW = [
    derived("group_64", heads=(64, 1), q_lens=(3, 0), kv_lens=(9, 4)),
    derived("group_71", heads=(71, 1), q_lens=(3, 5), kv_lens=(9, 5)),
    *(
        derived(
            f"dim_{head_dim}_page_{page_size}_{page_layout}",
            head_dim=head_dim,
            page_size=page_size,
            page_layout=page_layout,
            q_lens=(37, 1, 70),
            kv_lens=(300, 129, 64),
            padding_rows=1,
            padding_tokens=3,
        )
        for head_dim in (64, 128, 256)
        for page_size in (8, 32, 128)
        for page_layout in ("NHD", "HND")
    ),
]


def attend(case, inputs):
    options = AttentionOptions(**{key: value for key, value in inputs.kwargs.items() if key != "spec"})
    return paged_extend(*inputs.args, options, spec=case.spec, page_size=case.page_size)


@pytest.mark.parametrize(
    "case",
    [*INTERPRETED, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: case.name,
)
def test_mosaic_extend_agrees_with_the_oracle_without_races(interpreter, case):
    inputs = build(case)
    out, lse = attend(case, inputs)
    assert_close(case, inputs, out, lse)
    assert not gpu_callbacks.get_races().races_found


def lower_for_cuda(dtype, head_dim, page_size, page_layout, group_size, causal):
    spec = AttentionSpec(
        num_q_heads=2 * group_size, num_kv_heads=2, head_dim=head_dim, page_layout=page_layout, causal=causal
    )
    page = (page_size, 2) if page_layout == "NHD" else (2, page_size)
    pages = jax.ShapeDtypeStruct((3, 10, *page, head_dim), dtype)
    q = jax.ShapeDtypeStruct((101, spec.num_q_heads, head_dim), dtype)

    def extend(q, k_pages, v_pages, table, lens, cu_q_lens, layer):
        options = AttentionOptions(layer_index=layer)
        return paged_extend(q, k_pages, v_pages, table, lens, cu_q_lens, options, spec=spec, page_size=page_size)

    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 6), (4,), (5,), ())]
    return jax.jit(extend).trace(q, pages, pages, *ints).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
def test_mosaic_extend_lowers_for_cuda(head_dim, page_size, page_layout):
    # Each group size with each head size, and both dtypes, spread over the pages.
    number = (8, 16, 32, 64, 128).index(page_size)
    dtype = ("bfloat16", "float16")[number % 2]
    group_size = (1, 4, 5, 8, 128)[number]
    assert "mosaic_gpu" in lower_for_cuda(dtype, head_dim, page_size, page_layout, group_size, page_layout == "NHD")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
@pytest.mark.parametrize("group_size", [1, 4, 5, 8, 128])
def test_mosaic_extend_lowers_for_cuda_in_every_combination(dtype, head_dim, page_size, page_layout, group_size):
    assert "mosaic_gpu" in lower_for_cuda(dtype, head_dim, page_size, page_layout, group_size, True)


def test_heads_per_tile_leaves_few_rows_empty():
    assert [heads_per_tile(group) for group in (1, 4, 5, 7, 8, 33, 64, 71, 128)] == [1, 4, 5, 7, 8, 3, 32, 1, 32]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [8, 128])
def test_chosen_tiles_fit(head_dim, page_size):
    spec = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=head_dim)
    assert choose_tiles(spec).refuses(spec, 2, page_size) is None


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
    assert message in sizes.refuses(spec, 2, page_size)


def test_schedule_covers_every_token_once_longest_first():
    lengths, kv_lens, num_tokens = np.array([1, 0, 70, 9]), np.array([500, 3, 70, 0]), 91
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=64)
    ints = [jnp.asarray(values, jnp.int32) for values in (kv_lens, [0, *np.cumsum(lengths)], kv_lens - lengths + 1)]
    sizes = choose_tiles(spec)
    schedule = jax.jit(extend_schedule, static_argnames=("spec", "num_tokens", "sizes"))(
        *ints, spec=spec, num_tokens=num_tokens, sizes=sizes
    )
    items = np.asarray(schedule.items)
    covered = np.concatenate([np.arange(first, first + tokens) for _, first, tokens, *_ in items])
    np.testing.assert_array_equal(np.sort(covered), np.arange(num_tokens))
    np.testing.assert_array_equal(items[:, 3], np.sort(items[:, 3])[::-1])
    assert items[0, 3] == -(-500 // sizes.block_kv)
    for token, place in enumerate(np.asarray(schedule.place)):
        assert items[place // schedule.block_tokens, 1] + place % schedule.block_tokens == token
