"""Calls of the Hopper extend kernel that its tests share: cases of the table in forms that it takes, and lowering."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.call import AttentionOptions
from jattn_kernels.mosaic.sm90.extend import entry as extend
from jattn_kernels.mosaic.sm90.extend.entry import make_schedule, paged_extend, ragged_extend
from jattn_kernels.mosaic.sm90.extend.schedule import choose_extend_tiles
from tests.kernels.harness.case_table import CASES
from tests.kernels.harness.interpreter import interpreted
from tests.kernels.harness.mosaic_calls import mosaic_call, run, schedule_call

PAGED, RAGGED = (
    {case.name.removeprefix(f"{operation}_"): case for case in CASES if case.operation == operation}
    for operation in ("paged_extend", "ragged_extend")
)


@contextlib.contextmanager
def interpreted_in_few_blocks() -> Iterator[None]:
    """The interpreter is slow, and each block takes several work tiles, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            extend, "choose_extend_tiles", lambda *facts: dataclasses.replace(choose_extend_tiles(*facts), blocks=2)
        )
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
# Each loop of the kernel in one case at least, several features to a case; the others are in SLOW.
INTERPRETED = [
    derived("plain"),
    derived("long_query_more_tiles_than_stages", q_lens=(131, 1), kv_lens=(150, 700), **ONE),
    derived("hnd_layers", heads=(2, 2), page_layout="HND", num_layers=3, layer_index=1, page_size=64),
    derived("dim_128", head_dim=128, q_lens=(9, 2), kv_lens=(140, 2), page_size=16),
    derived("chunk_kv_start", of="kv_start", chunk_size=100, **LONG, kv_start=(5, 40), q_start=(270, 44)),
    derived(
        "mask_window_q_positions",
        of="padding",
        heads=(2, 1),
        window_left=130,
        kv_lens=(150, 1, 0, 70),
        q_lens=(9, 1, 3, 20),
    ),
    derived(
        "ragged_invariant", among=RAGGED, of="padding", batch_invariant=True, heads=(2, 1), num_layers=2, layer_index=1
    ),
    derived("fp8", of="fp8", heads=(2, 1), q_scale="rows", q_lens=(40, 3, 0), kv_lens=(300, 20, 9)),
    derived("fp8_queries_dim_128", **FP8_QUERIES, head_dim=128, q_lens=(9, 2), kv_lens=(140, 2), **ONE),
    derived("ragged_fp8_float16", among=RAGGED, of="fp8", dtype="float16", q_lens=(5, 9), kv_lens=(13, 140), **ONE),
    derived("rope_fp8_positions", of="rope", kv_dtype="float8_e4m3fn", q_positions=True, kv_scale="heads", **ONE),
]
SLOW = [
    derived("tree_dim_192_128", of="tree", head_dim=192, v_head_dim=128, heads=(8, 1), window_left=20),
    derived(
        "not_causal_float16_dim_256",
        of="not_causal",
        dtype="float16",
        head_dim=256,
        q_lens=(9, 2),
        kv_lens=(70, 2),
        heads=(2, 1),
        page_size=128,
    ),
    derived(
        "ragged_dim_80_96",
        among=RAGGED,
        of="padding",
        head_dim=80,
        v_head_dim=96,
        q_lens=(5, 3, 9, 16),
        kv_lens=(13, 0, 140, 16),
    ),
    derived("dim_96_80_page_256", head_dim=96, v_head_dim=80, heads=(5, 1), q_lens=(9,), kv_lens=(70,), page_size=256),
    derived("rope_dim_128", of="rope_and_kv_start", **LONG, head_dim=128, kv_start=(5, 70_000), page_size=16),
    derived("alibi_windows", of="alibi", causal=False, window_left=40, window_right=9, page_size=16, **LONG),
    derived("ragged_rope_float16", among=RAGGED, of="rope", dtype="float16", q_lens=(5, 9), kv_lens=(13, 140), **ONE),
    derived("padding", of="padding", custom_mask=False, q_positions=False, heads=(2, 1)),
    derived("not_causal_float16", of="not_causal", dtype="float16", **ONE),
    derived("more_tiles_than_stages", q_lens=(3,), kv_lens=(700,), **ONE),
    derived("dim_256", head_dim=256, q_lens=(9, 2), kv_lens=(70, 2), heads=(2, 1), page_size=128),
    derived("ragged", among=RAGGED, of="padding", q_lens=(5, 3, 9, 16), kv_lens=(13, 0, 140, 16)),
    derived("no_queries_in_the_middle", of="no_queries_in_the_middle", custom_mask=False, **ONE),
    derived("group_5", heads=(5, 1)),
    derived("dim_80", head_dim=80, heads=(2, 1), q_lens=(9, 17), kv_lens=(140, 20), padding_tokens=3, page_size=16),
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
    """The output and its lse."""
    options = AttentionOptions(**inputs.options)
    if case.operation == "ragged_extend":
        return run(ragged_extend, case.operation, inputs.args, options, case.spec)
    return run(paged_extend, case.operation, inputs.args, options, case.spec, case.page_size)


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

    def extend_pages(q, k_pages, v_pages, table, lens, cu_q_lens, options):
        call = schedule_call("paged_extend", spec, 101, kv_dtype or dtype)
        schedule = make_schedule(call, lens, cu_q_lens, None) if given else None
        options = AttentionOptions(**options, schedule=schedule)
        arrays = q, k_pages, v_pages, table, lens, cu_q_lens
        return paged_extend(*mosaic_call("paged_extend", arrays, options, spec, page_size))

    def extend_ragged(q, k, v, cu_q_lens, cu_kv_lens, options):
        arrays = q, k, v, cu_q_lens, cu_kv_lens
        return ragged_extend(*mosaic_call("ragged_extend", arrays, AttentionOptions(**options), spec))

    q = jax.ShapeDtypeStruct((101, spec.num_q_heads, head_dim), dtype)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 6), (4,), (5,), (5,))]
    given_options = {name: jax.ShapeDtypeStruct(*reversed(shapes[name])) for name in ("layer_index", *options)}
    if page_size is None:
        face, args = extend_ragged, (q, rows(head_dim), rows(spec.value_dim), *ints[2:], given_options)
    else:
        v_pages = None if spec.combined_pool else pages(spec.value_dim)
        face, args = extend_pages, (q, pages(head_dim), v_pages, *ints[:3], given_options)
    return jax.jit(face).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
