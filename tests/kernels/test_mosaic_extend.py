"""The Hopper extend kernel on the CPU: against the oracle under the interpreter, and lowered for CUDA."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.call import AttentionOptions
from jattn_kernels.mosaic.sm90 import extend, extend_turned
from jattn_kernels.mosaic.sm90.extend import make_schedule, paged_extend, ragged_extend
from jattn_kernels.mosaic.sm90.extend_formats import ExtendFormats
from jattn_kernels.mosaic.sm90.extend_schedule import ExtendSchedule, ExtendTiles, choose_tiles, heads_per_tile, is_own
from tests.kernels.cases import CASES, assert_close, build
from tests.kernels.chunked_prompt import chunked_prompt, prompt_behind
from tests.kernels.interpreter import interpreted

PAGED, RAGGED = (
    {case.name.removeprefix(f"{operation}_"): case for case in CASES if case.operation == operation}
    for operation in ("paged_extend", "ragged_extend")
)


@pytest.fixture
def interpreter(monkeypatch):
    # Few blocks: the interpreter is slow, and each takes several units of work, as on a GPU.
    monkeypatch.setattr(extend, "choose_tiles", lambda *facts: dataclasses.replace(choose_tiles(*facts), blocks=2))
    with interpreted():
        yield


def derived(name, of="plain", *, among=PAGED, heads=(4, 2), head_dim=64, dtype="bfloat16", **fields):
    """A case of the table in a form that the kernel takes; `fields` of the case or of its spec."""
    source = among[of]
    spec_names = {field.name for field in dataclasses.fields(AttentionSpec)}
    facts = {key: fields.pop(key) for key in spec_names & fields.keys()}
    spec = dataclasses.replace(source.spec, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, **facts)
    return dataclasses.replace(source, name=name, spec=spec, dtype=dtype, **fields)


ONE = {"heads": (1, 1)}
LAYERS = {"num_layers": 2, "layer_index": 1}
LONG = {"heads": (2, 1), "q_lens": (40, 3), "kv_lens": (300, 20)}  # more tiles of keys than one
FP8_QUERIES = {"of": "fp8_queries", "dtype": "float8_e4m3fn"}
INTERPRETED = [
    derived("plain"),
    derived("not_causal_float16", of="not_causal", dtype="float16", **ONE),
    derived("no_queries_in_the_middle", of="no_queries_in_the_middle", custom_mask=False, **ONE),
    derived("padding", of="padding", custom_mask=False, q_positions=False, heads=(2, 1)),
    derived("long_query", q_lens=(131, 1), kv_lens=(150, 300), **ONE),
    derived("more_tiles_than_stages", q_lens=(3,), kv_lens=(700,), **ONE),
    derived("group_5", heads=(5, 1)),
    derived("hnd_layers", heads=(2, 2), page_layout="HND", num_layers=3, layer_index=1, page_size=64),
    derived("dim_128", head_dim=128, q_lens=(9, 2), kv_lens=(140, 2), page_size=16),
    derived("dim_256", head_dim=256, q_lens=(9, 2), kv_lens=(70, 2), heads=(2, 1), page_size=128),
    derived("chunk_kv_start", of="kv_start", chunk_size=100, **LONG, kv_start=(5, 40), q_start=(270, 44)),
    derived("alibi_windows", of="alibi", causal=False, window_left=40, window_right=9, page_size=16, **LONG),
    derived(
        "mask_window_q_positions",
        of="padding",
        heads=(2, 1),
        window_left=130,
        kv_lens=(150, 1, 0, 70),
        q_lens=(9, 1, 3, 20),
    ),
    derived("tree_dim_192_128", of="tree", head_dim=192, v_head_dim=128, heads=(8, 1), window_left=20),
    derived("dim_80", head_dim=80, heads=(2, 1), q_lens=(9, 17), kv_lens=(140, 20), padding_tokens=3, page_size=16),
    derived("dim_96_80_page_256", head_dim=96, v_head_dim=80, heads=(5, 1), q_lens=(9,), kv_lens=(70,), page_size=256),
    derived(
        "ragged_invariant", among=RAGGED, of="padding", batch_invariant=True, heads=(2, 1), num_layers=2, layer_index=1
    ),
    derived("ragged_dim_80_96", among=RAGGED, of="padding", head_dim=80, v_head_dim=96, heads=(2, 1)),
    derived("ragged", among=RAGGED, of="padding", q_lens=(5, 3, 9, 16), kv_lens=(13, 0, 140, 16)),
    derived("fp8", of="fp8", heads=(2, 1), q_scale="rows", q_lens=(40, 3, 0), kv_lens=(300, 20, 9)),
    derived("fp8_queries_dim_128", **FP8_QUERIES, head_dim=128, q_lens=(9, 2), kv_lens=(140, 2), **ONE),
    derived("ragged_fp8_float16", among=RAGGED, of="fp8", dtype="float16", q_lens=(5, 9), kv_lens=(13, 140), **ONE),
    derived("rope_dim_128", of="rope_and_kv_start", **LONG, head_dim=128, kv_start=(5, 70_000), page_size=16),
    derived("rope_fp8_positions", of="rope", kv_dtype="float8_e4m3fn", q_positions=True, kv_scale="heads", **ONE),
    derived("ragged_rope_float16", among=RAGGED, of="rope", dtype="float16", q_lens=(5, 9), kv_lens=(13, 140), **ONE),
]
SLOW = [
    derived("positions", of="kv_start", page_size=16, **ONE),
    derived("queries_before_keys", of="queries_before_keys", **ONE),
    derived("q_start_past_the_end", of="q_start_past_the_end", **ONE),
    derived("more_queries_than_keys", of="more_queries_than_keys", **ONE),
    derived("giant_among_dwarfs", of="giant", page_size=32, **ONE),
    derived("one_token", q_lens=(1,), kv_lens=(5,), **ONE),
    derived("group_8", heads=(8, 1), q_lens=(11, 5, 9, 16)),
    derived("negative_scale", sm_scale=-0.5, q_lens=(5,), kv_lens=(13,), **ONE),
    derived(
        "fp8_e5m2_negative_scale", of="fp8", kv_dtype="float8_e5m2", sm_scale=-0.3, q_lens=(70,), kv_lens=(200,), **ONE
    ),
    derived("fp8_dim_192_128_hnd", of="fp8", heads=(2, 2), head_dim=192, v_head_dim=128, page_layout="HND"),
    derived("fp8_window_alibi_cap", of="fp8", alibi=True, window_left=70, logits_soft_cap=5.0, sm_scale=-0.5, **LONG),
    derived(
        "fp8_queries_group_7", of="fp8_queries", dtype="float8_e5m2", heads=(7, 1), q_lens=(11, 5), kv_lens=(30, 5)
    ),
    derived("fp8_dim_256_mask", of="fp8", head_dim=256, custom_mask=True, page_size=64, **ONE),
    derived("fp8_one_ready_tile", of="fp8_queries", dtype="float16", head_dim=256, q_lens=(3,), kv_lens=(300,), **ONE),
    derived("rope_dim_256_window_alibi", of="rope", head_dim=256, window_left=20, alibi=True, heads=(2, 1)),
    derived("rope_dim_192_128_tree", of="tree", rope_theta=1e4, head_dim=192, v_head_dim=128, heads=(8, 1)),
    derived("rope_fp8_queries", of="fp8_queries", dtype="float8_e4m3fn", rope_theta=1e4, head_dim=128, **LONG),
    derived("rope_more_tiles_than_stages", of="rope", head_dim=128, q_lens=(3,), kv_lens=(700,), **ONE),
    derived("ragged_rope_fp8", among=RAGGED, of="fp8", rope_theta=1e4, q_lens=(5, 9), kv_lens=(13, 140), **ONE),
    derived("ragged_fp8_window", among=RAGGED, of="fp8", window_left=20, q_lens=(5, 9), kv_lens=(13, 140), **ONE),
    derived(
        "window_sinks_scales",
        of="sinks",
        window_left=70,
        **{**LONG, "heads": (2, 2)},
        q_scale="rows",
        kv_scale="rows",
        **LAYERS,
    ),
    derived(
        "alibi_soft_cap",
        of="alibi",
        heads=(2, 1),
        logits_soft_cap=5.0,
        q_lens=(40, 3),
        kv_lens=(140, 9),
        q_start=(90, 6),
    ),
    derived("combined_page_256", **LAYERS, combined_pool="pages_first", page_size=256, **LONG),
    derived("ragged_encoder", among=RAGGED, of="encoder", q_lens=(9, 0, 70), kv_lens=(9, 0, 130), **ONE),
    derived("window_of_both_sides_hnd", causal=False, window_left=90, window_right=20, page_layout="HND", **LONG),
    derived(
        "q_positions_alibi", of="q_positions", heads=(2, 1), alibi=True, sm_scale=-0.5, padding_rows=1, padding_tokens=2
    ),
    derived("dim_64_128_soft_cap", v_head_dim=128, logits_soft_cap=5.0, **ONE),
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
    if case.operation == "ragged_extend":
        return ragged_extend(*inputs.args, options, spec=case.spec)
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


def ahead_of_the_kernel(cases):
    return [case for case in cases if case.operation == "paged_extend" and case.spec.rope_theta is not None]


@pytest.mark.parametrize(
    "case",
    [
        *ahead_of_the_kernel(INTERPRETED),
        derived("rope_combined_layers", of="rope", **LAYERS, combined_pool="kv_first", page_size=256, **LONG),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                *ahead_of_the_kernel(SLOW),
                derived("rope_empty_hnd", of="rope", page_layout="HND", q_lens=(3, 0, 5), kv_lens=(9, 140, 0), **ONE),
            )
        ),
    ],
    ids=lambda case: case.name,
)
def test_mosaic_extend_over_keys_turned_ahead_agrees_with_the_oracle_without_races(interpreter, monkeypatch, case):
    monkeypatch.setattr(extend_turned, "_LEAST_ROWS", 0)
    inputs = build(case)
    out, lse = attend(case, inputs)
    assert_close(case, inputs, out, lse)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_mosaic_extend_of_a_prompt_is_the_same_to_the_bit_in_chunks_beside_another(interpreter, monkeypatch, kv_dtype):
    sizes = ExtendTiles(block_kv=64, k_stages=2, v_stages=2, ready_stages=2, blocks=1)
    monkeypatch.setattr(extend, "choose_tiles", lambda *facts: sizes)
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=64, batch_invariant=True, window_left=40)
    prompt = chunked_prompt(spec, num_tokens=80, cut=33, kv_dtype=kv_dtype)
    whole = paged_extend(*prompt.whole, AttentionOptions(), spec=spec, page_size=16)
    chunked = paged_extend(*prompt.chunked, AttentionOptions(), spec=spec, page_size=16)
    for alone, beside in zip(whole, chunked, strict=True):
        np.testing.assert_array_equal(alone, beside[prompt.tokens])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_mosaic_extend_over_ragged_keys_is_the_same_to_the_bit_behind_another(interpreter, monkeypatch, kv_dtype):
    sizes = ExtendTiles(block_kv=64, k_stages=2, v_stages=2, ready_stages=2, blocks=1)
    monkeypatch.setattr(extend, "choose_tiles", lambda *facts: sizes)
    spec = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=64, batch_invariant=True)
    prompt = prompt_behind(spec, num_tokens=150, kv_dtype=kv_dtype)
    alone = ragged_extend(*prompt.whole, AttentionOptions(), spec=spec)
    behind = ragged_extend(*prompt.chunked, AttentionOptions(), spec=spec)
    chex.assert_trees_all_equal(alone, tuple(x[prompt.tokens] for x in behind))


def lower_for_cuda(
    dtype,
    head_dim,
    page_size,
    page_layout,
    group_size,
    *,
    kv_dtype=None,
    options=(),
    value_dim=None,
    given=False,
    **facts,
):
    spec = AttentionSpec(
        num_q_heads=2 * group_size,
        num_kv_heads=2,
        head_dim=head_dim,
        v_head_dim=value_dim,
        page_layout=page_layout,
        **facts,
    )
    page = (page_size, 2) if page_layout == "NHD" else (2, page_size)  # not of ragged keys
    leading = {None: (3, 10), "pages_first": (3, 10, 2), "kv_first": (3, 2, 10)}[spec.combined_pool]
    shapes = {
        **dict.fromkeys(("q_start", "kv_start"), (jnp.int32, (4,))),
        **dict.fromkeys(("k_scale", "v_scale"), (jnp.float32, (3, 2))),
        **dict.fromkeys(("alibi_slopes", "sinks"), (jnp.float32, (spec.num_q_heads,))),
        "q_scale": (jnp.float32, (4, 2)),
        "q_positions": (jnp.int32, (101,)),
        "custom_mask": (jnp.bool_, (999,)),
        "layer_index": (jnp.int32, ()),
    }

    def pages(width):
        return jax.ShapeDtypeStruct((*leading, *page, width), kv_dtype or dtype)

    def rows(width):
        return jax.ShapeDtypeStruct((3, 1001, 2, width), kv_dtype or dtype)

    def extend(q, k_pages, v_pages, table, lens, cu_q_lens, options):
        facts = {"spec": spec, "num_tokens": 101, "kv_itemsize": jnp.dtype(kv_dtype or dtype).itemsize}
        schedule = make_schedule(lens, cu_q_lens, **facts) if given else None
        options = AttentionOptions(**options, schedule=schedule)
        return paged_extend(q, k_pages, v_pages, table, lens, cu_q_lens, options, spec=spec, page_size=page_size)

    def extend_ragged(q, k, v, cu_q_lens, cu_kv_lens, options):
        return ragged_extend(q, k, v, cu_q_lens, cu_kv_lens, AttentionOptions(**options), spec=spec)

    q = jax.ShapeDtypeStruct((101, spec.num_q_heads, head_dim), dtype)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 6), (4,), (5,), (5,))]
    given_options = {name: jax.ShapeDtypeStruct(*reversed(shapes[name])) for name in ("layer_index", *options)}
    if page_size is None:
        face, args = extend_ragged, (q, rows(head_dim), rows(spec.value_dim), *ints[2:], given_options)
    else:
        v_pages = None if spec.combined_pool else pages(spec.value_dim)
        face, args = extend, (q, pages(head_dim), v_pages, *ints[:3], given_options)
    return jax.jit(face).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
def test_mosaic_extend_lowers_for_cuda(head_dim, page_size):
    # Each group size with each head size, both dtypes and layouts, spread over the pages.
    number = (8, 16, 32, 64, 128).index(page_size)
    dtype = ("bfloat16", "float16")[number % 2]
    group_size = (1, 4, 5, 8, 128)[number]
    page_layout = ("NHD", "HND")[(number + head_dim // 128) % 2]
    causal = page_layout == "NHD"
    assert "mosaic_gpu" in lower_for_cuda(dtype, head_dim, page_size, page_layout, group_size, causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
@pytest.mark.parametrize("group_size", [1, 4, 5, 8, 128])
def test_mosaic_extend_lowers_for_cuda_in_every_combination(dtype, head_dim, page_size, page_layout, group_size):
    assert "mosaic_gpu" in lower_for_cuda(dtype, head_dim, page_size, page_layout, group_size)


NAMES_OF_SCALES = ("q_scale", "k_scale", "v_scale")
FEATURES = {
    "window": {"window_left": 100, "given": True},
    "window_of_both_sides": {"window_left": 100, "window_right": 3, "causal": False},
    "chunk": {"chunk_size": 64, "options": ("kv_start",)},
    "soft_cap": {"logits_soft_cap": 30.0},
    "alibi": {"options": ("alibi_slopes",)},
    "alibi_not_causal": {"options": ("alibi_slopes", "q_start"), "causal": False},
    "sinks_scales": {"options": ("sinks", *NAMES_OF_SCALES)},
    "q_positions": {"options": ("q_positions",)},
    "custom_mask": {"options": ("custom_mask",)},
    "combined": {"combined_pool": "pages_first"},
    "invariant": {"batch_invariant": True},
    "invariant_window": {"batch_invariant": True, "window_left": 100},
    "rope": {"rope_theta": 1e4, "options": ("kv_start",), "given": True},
    "rope_window_alibi": {"rope_theta": 5e5, "rope_scale": 8.0, "window_left": 100, "options": ("alibi_slopes",)},
    "all": {
        "options": ("custom_mask", "q_positions", "alibi_slopes", "sinks", *NAMES_OF_SCALES),
        "window_left": 100,
        "logits_soft_cap": 30.0,
    },
}
FP8 = ("float8_e4m3fn", "float8_e5m2")
DTYPES = [("bfloat16", "bfloat16"), *itertools.product(("bfloat16", "float16", *FP8), FP8)]
WIDTHS = [(head_dim, value_dim) for head_dim in (64, 128, 192, 256) for value_dim in (64, 128, 192, 256)]
FP8_WIDTHS = tuple(WIDTHS)
WIDTHS += [(80, 80), (96, 96), (80, 96), (96, 80), (64, 80), (96, 64), (80, 128), (192, 96), (256, 80), (96, 256)]


@pytest.mark.parametrize(
    ("feature", "head_dim", "value_dim", "page_size", "group_size"),
    [
        ("window", 128, 128, 16, 4),
        ("chunk", 256, 256, 256, 1),
        ("custom_mask", 64, 64, 8, 5),
        ("all", 192, 128, 64, 8),
        ("invariant", 64, 128, 256, 128),
        ("chunk", 128, 128, None, 4),
        ("rope", 128, 128, 16, 4),
        ("rope_window_alibi", 64, 64, None, 5),
        ("window", 80, 80, 16, 7),
        ("custom_mask", 96, 80, 8, 5),
        ("alibi", 80, 128, None, 4),
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
        ("bfloat16", "float8_e4m3fn", 128, 128, 16),
        ("float16", "float8_e5m2", 64, 128, 128),
        ("float16", "float8_e5m2", 256, 256, 8),
        ("float8_e5m2", "float8_e4m3fn", 192, 64, 64),
        ("float8_e4m3fn", "float8_e4m3fn", 128, 128, None),
    ],
)
def test_mosaic_extend_lowers_for_cuda_with_fp8(q_dtype, kv_dtype, head_dim, value_dim, page_size):
    theta = 1e4 if head_dim == 128 and page_size else None
    facts = {"kv_dtype": kv_dtype, "value_dim": value_dim, "options": NAMES_OF_SCALES, "rope_theta": theta}
    assert "mosaic_gpu" in lower_for_cuda(q_dtype, head_dim, page_size, "HND", 4, **facts, given=True)


def lower_with_keys_turned_ahead(monkeypatch, q_dtype, kv_dtype, head_dim, value_dim, page_size, page_layout):
    monkeypatch.setattr(extend_turned, "_LEAST_ROWS", 0)
    facts = {"kv_dtype": kv_dtype, "value_dim": value_dim, "options": NAMES_OF_SCALES, "rope_theta": 1e4}
    lowered = lower_for_cuda(q_dtype, head_dim, page_size, page_layout, 4, **facts, given=True)
    assert lowered.count("mosaic_gpu_v2") == 2


@pytest.mark.parametrize(
    "facts",
    [
        ("bfloat16", "bfloat16", 128, 128, 16, "NHD"),
        ("float16", "float16", 192, 128, 256, "HND"),
        ("float16", "float8_e5m2", 128, 64, 8, "NHD"),
    ],
    ids=str,
)
def test_mosaic_extend_lowers_for_cuda_with_keys_turned_ahead(monkeypatch, facts):
    lower_with_keys_turned_ahead(monkeypatch, *facts)


@pytest.mark.slow
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize(("head_dim", "value_dim"), FP8_WIDTHS)
def test_mosaic_extend_lowers_for_cuda_with_keys_of_every_dtype_and_width_turned_ahead(
    monkeypatch, q_dtype, kv_dtype, head_dim, value_dim
):
    number = len(DTYPES) * FP8_WIDTHS.index((head_dim, value_dim)) + DTYPES.index((q_dtype, kv_dtype))
    page_size, page_layout = (8, 16, 64, 128, 256)[number % 5], ("NHD", "HND")[number % 2]
    lower_with_keys_turned_ahead(monkeypatch, q_dtype, kv_dtype, head_dim, value_dim, page_size, page_layout)


@pytest.mark.parametrize(
    ("facts", "num_tokens", "num_seqs", "max_keys", "ahead"),
    [
        ({}, 8192, 1, 8192, True),
        ({"rope_theta": None}, 8192, 1, 8192, False),
        ({"batch_invariant": True}, 8192, 1, 8192, False),
        ({}, 8192, 16, 8192, True),
        ({}, 8192, 17, 8192, False),  # bytes
        ({}, 256, 4, 8192, True),
        ({}, 255, 4, 8192, False),  # work
        ({"window_left": 1023}, 2048, 1, 32768, True),
        ({"window_left": 1022}, 2048, 1, 32768, False),
        ({"chunk_size": 1023}, 2048, 1, 32768, False),
    ],
)
def test_keys_are_turned_ahead_where_that_is_little_beside_the_work(facts, num_tokens, num_seqs, max_keys, ahead):
    spec = AttentionSpec(**{"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rope_theta": 1e4, **facts})
    formats = ExtendFormats.of("bfloat16", "bfloat16", spec)
    sizes = {"num_tokens": num_tokens, "num_seqs": num_seqs, "max_keys": max_keys}
    assert extend_turned.turns_ahead(spec, formats, **sizes) == ahead


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
        formats = ExtendFormats.of(q_dtype, kv_dtype, spec)
        sizes = choose_tiles(spec, formats)
        assert [sizes.refuses(spec, formats, page_size) for page_size in (8, 256)] == [None, None]
        lens, facts = jnp.array([9], jnp.int32), {"num_tokens": 9, "kv_itemsize": jnp.dtype(kv_dtype).itemsize}
        schedule = jax.eval_shape(functools.partial(make_schedule, spec=spec, **facts), lens, jnp.array([0, 9]))
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
    assert message in sizes.refuses(spec, ExtendFormats.of("bfloat16", "bfloat16", spec), page_size)


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
    schedule = jax.jit(make_schedule, static_argnames=("spec", "num_tokens", "kv_itemsize"))(
        lens, offsets, spec=spec, num_tokens=num_tokens, kv_itemsize=2
    )
    assert isinstance(schedule, ExtendSchedule)
    return schedule


@pytest.mark.parametrize("window_left", [None, 200])
def test_schedule_covers_every_token_once_longest_first(window_left):
    num_tokens = 91
    schedule = schedule_of([1, 0, 70, 9], [500, 3, 70, 0], num_tokens, window_left=window_left)
    items = np.asarray(schedule.items)
    covered = np.concatenate([np.arange(first, first + tokens) for _, first, tokens, *_ in items])
    np.testing.assert_array_equal(np.sort(covered), np.arange(num_tokens))
    first_tiles = 0 if window_left is None else items[:, 6]
    key_tiles = items[:, 3] - first_tiles
    np.testing.assert_array_equal(key_tiles, np.sort(key_tiles)[::-1])
    assert items[0, 3] == -(-500 // schedule.block_kv)
    for token, place in enumerate(np.asarray(schedule.place)):
        assert items[place // schedule.block_tokens, 1] + place % schedule.block_tokens == token


@pytest.mark.parametrize(
    ("facts", "item", "tiles"),
    [
        # 32 tokens at 968 .. 999, 16 a tile of rows; 128 keys a tile of keys.
        ({"window_left": 300}, (5, 8), [[5, 6, 7, 8], [5, 6, 7, 8]]),
        ({"window_left": 970}, (0, 8), [[0, 1, 7, 8], [0, 1, 7, 8]]),
        ({"chunk_size": 984}, (0, 8), [[0, 0, 7, 8], [7, 8, 8, 8]]),
        ({"causal": False, "window_left": 10, "window_right": 0}, (7, 8), [[7, 8, 8, 8], [7, 8, 8, 8]]),
    ],
)
def test_schedule_skips_tiles_that_no_row_sees_and_knows_those_that_all_see(facts, item, tiles):
    schedule = schedule_of([32], [1000], 32, **facts)
    np.testing.assert_array_equal(schedule.items[0, np.array([6, 3])], item)
    np.testing.assert_array_equal(schedule.rows.ranges[0], tiles)
