"""Cases of the sizes that GPU kernels are made for, beside the table of `case_table`: on Hopper none may be refused."""

import itertools
from typing import Any

from tests.kernels.harness.case_table import Case
from tests.kernels.harness.kernel_sized_batches import FP8, FP8_KEYS, FP8_ROWS, case_of, spec_of
from tests.kernels.harness.latent_cases import LATENT_CASES
from tests.kernels.harness.rotated_cases import rotated


def _kernel_sized(operation: Any) -> list[Case]:
    """What the kernels of an NVIDIA GPU are made for; none of them may be refused on Hopper."""
    widths = [
        case_of(operation, f"{dtype}_dim_{head_dim}", dtype=dtype, spec=spec_of(head_dim=head_dim))
        for dtype, head_dim in itertools.product(("bfloat16", "float16"), (64, 128, 256))
    ]
    pages = [
        case_of(
            operation,
            f"{layout}_page_{page_size}_dim_{head_dim}",
            page_size=page_size,
            spec=spec_of(page_layout=layout, head_dim=head_dim),
        )
        for layout, page_size, head_dim in itertools.product(("NHD", "HND"), (8, 64, 128), (64, 128))
    ]
    groups = [
        case_of(operation, f"group_{q // kv}_of_{kv}", spec=spec_of(num_q_heads=q, num_kv_heads=kv))
        for q, kv in ((2, 2), (4, 2), (5, 1), (6, 1), (14, 2), (8, 1), (24, 2), (16, 1), (32, 1), (32, 8))
    ]
    others = [
        case_of(operation, "not_causal", spec=spec_of(causal=False)),
        case_of(operation, "layers", num_layers=3, layer_index=1),
        case_of(operation, "kv_start", kv_start=(5, 0, 3, 64, 0, 7)),
        case_of(operation, "q_start", kv_start=(5, 0, 3, 64, 0, 7), q_start=(90, 0, 3, 64, 200, 1000)),
        case_of(operation, "sm_scale", spec=spec_of(sm_scale=0.25)),
    ]
    return [*widths, *pages, *groups, *others]


def _decode_features() -> list[Case]:
    """What decode does beyond masking by length, alone and together, at lengths that are split."""
    verify = {"q_lens": (6,) * 6, "kv_lens": (130, 6, 64, 0, 257, 1500)}
    cases = [
        *((f"dim_{dim}_{value}", {"spec": spec_of(head_dim=dim, v_head_dim=value)}) for dim, value in _WIDTHS),
        ("dim_80_hnd_page_64", {"spec": spec_of(head_dim=80, page_layout="HND"), "page_size": 64}),
        *((f"dim_{dim}_float16", {"dtype": "float16", "spec": spec_of(head_dim=dim)}) for dim in (96, 192)),
        ("page_32", {"page_size": 32}),
        ("page_256", {"page_size": 256}),
        ("page_256_hnd", {"page_size": 256, "spec": spec_of(page_layout="HND")}),
        ("combined_pages_first", {"spec": spec_of(combined_pool="pages_first")}),
        ("combined_kv_first", {"spec": spec_of(combined_pool="kv_first"), "num_layers": 2, "layer_index": 1}),
        ("window", {"spec": spec_of(window_left=200)}),
        ("window_verify", {"spec": spec_of(window_left=100), **verify}),
        ("window_of_both_sides", {"spec": spec_of(causal=False, window_left=70, window_right=3), **verify}),
        ("chunk", {"spec": spec_of(chunk_size=256), "kv_start": (5, 0, 3, 64, 0, 7)}),
        ("soft_cap", {"spec": spec_of(logits_soft_cap=5.0, sm_scale=0.5)}),
        ("alibi", {"alibi": True}),
        ("alibi_group_1", {"alibi": True, "spec": spec_of(num_kv_heads=8)}),
        ("alibi_verify", {"alibi": True, "spec": spec_of(causal=False), **verify}),
        ("sinks", {"sinks": True}),
        ("scales", {"q_scale": "rows", "kv_scale": "rows", "num_layers": 2, "layer_index": 1}),
        ("q_positions", {"q_positions": True, **verify}),
        ("custom_mask", {"custom_mask": True, **verify}),
        ("custom_mask_of_one_token", {"custom_mask": True, "spec": spec_of(window_left=100)}),
        (
            "tree",
            {"tree": (-1, 0, 0, 1, 1, -1), "spec": spec_of(num_q_heads=32, window_left=100), **verify, **_NO_EMPTY},
        ),
        *(
            (f"{kv}_{q}_dim_{dim}", {"dtype": q, "kv_dtype": kv, "kv_scale": "heads", "spec": spec_of(head_dim=dim)})
            for kv, q, dim in itertools.product(FP8, ("bfloat16", "float8_e4m3fn"), (64, 128, 256))
        ),
        ("fp8_verify_window_hnd", {**FP8_KEYS, **verify, "spec": spec_of(window_left=100, page_layout="HND")}),
        ("fp8_float16_queries", {**FP8_KEYS, "dtype": "float16"}),
        ("fp8_dim_192_128", {**FP8_KEYS, "q_scale": "rows", "spec": spec_of(head_dim=192, v_head_dim=128)}),
        *(
            (f"fp8_{dtype}_dim_{dim}_{value}_{name}", {**FP8_ROWS, **batch, "dtype": dtype, "spec": spec})
            for dtype, (dim, value) in itertools.product(
                ("bfloat16", "float16", "float8_e5m2"), ((192, 192), (192, 128), (256, 256))
            )
            for name, batch, heads in (("of_8", {}, (32, 8)), ("verify", verify, (8, 2)))
            for spec in [spec_of(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, v_head_dim=value)]
        ),
        *((f"fp8_page_{page}", {**FP8_ROWS, "page_size": page}) for page in (8, 64, 256)),
        *(
            (f"fp8_group_{q // kv}_of_{kv}", {**FP8_ROWS, "spec": spec_of(num_q_heads=q, num_kv_heads=kv)})
            for q, kv in ((2, 2), (5, 1), (24, 2), (32, 8))
        ),
        ("fp8_mask", {**FP8_ROWS, "custom_mask": True, **verify}),
        ("fp8_chunk_soft_cap", {**FP8_ROWS, "spec": spec_of(chunk_size=256, logits_soft_cap=5.0)}),
        ("fp8_alibi_sinks", {**FP8_ROWS, "alibi": True, "sinks": True}),
        ("fp8_combined", {**FP8_ROWS, "spec": spec_of(combined_pool="pages_first")}),
        ("everything_verify", {**_EVERYTHING, **verify, "kv_start": (5, 0, 3, 64, 0, 7)}),
        ("everything_verify_mask", {**_EVERYTHING, **verify, "custom_mask": True, "q_positions": True}),
        *((f"rope_dim_{dim}", {"spec": spec_of(rope_theta=1e4, head_dim=dim)}) for dim in (128, 256)),
        (
            "rope_verify",
            {"spec": spec_of(rope_theta=5e5, rope_scale=8.0), **verify, "kv_start": (5, 0, 3, 64, 0, 70000)},
        ),
        ("rope_fp8", {**FP8_KEYS, "spec": spec_of(rope_theta=1e4)}),
        ("invariant", {"spec": spec_of(batch_invariant=True), "kv_lens": (1024, 1, 64, 0, 1025, 3000)}),
        ("all", {"alibi": True, "sinks": True, "spec": spec_of(logits_soft_cap=5.0, window_left=300), **verify}),
    ]
    return [case_of("paged_decode", name, **fields) for name, fields in cases]


def _extend_fp8() -> list[tuple[str, dict[str, Any]]]:
    """Pages of fp8: with each dtype of queries, pages of all sizes, and what else meets their factors or tiles."""
    fp8 = FP8_ROWS
    queries = ("bfloat16", "float16", *FP8)
    return [
        *(
            (f"{kv}_{q}_dim_{dim}", {"dtype": q, "kv_dtype": kv, "kv_scale": "heads", "spec": spec_of(head_dim=dim)})
            for kv, q, dim in itertools.product(FP8, queries, (64, 128, 256))
        ),
        *(
            (f"fp8_{layout}_page_{page_size}", {**fp8, "page_size": page_size, "spec": spec_of(page_layout=layout)})
            for layout, page_size in itertools.product(("NHD", "HND"), (8, 64, 128, 256))
        ),
        *(
            (f"fp8_dim_{dim}_{value}", {**fp8, "spec": spec_of(head_dim=dim, v_head_dim=value)})
            for dim, value in ((192, 192), (192, 128), (128, 64), (64, 256), (256, 64))
        ),
        *(
            (f"fp8_group_{q // kv}_of_{kv}", {**fp8, "spec": spec_of(num_q_heads=q, num_kv_heads=kv)})
            for q, kv in ((2, 2), (5, 1), (32, 8))
        ),
        ("fp8_without_scales", {**fp8, "kv_scale": None}),
        ("fp8_scales_layers", {**FP8_KEYS, "q_scale": "rows"}),
        ("fp8_queries_scales", {**FP8_KEYS, "dtype": "float8_e4m3fn", "q_scale": "rows"}),
        (
            "fp8_queries_group_7_dim_64",
            {**fp8, "dtype": "float8_e4m3fn", "spec": spec_of(num_q_heads=7, num_kv_heads=1, head_dim=64)},
        ),
        ("fp8_not_causal", {**fp8, "spec": spec_of(causal=False)}),
        ("fp8_window", {**fp8, "spec": spec_of(window_left=100)}),
        ("fp8_chunk", {**fp8, "spec": spec_of(chunk_size=100), "kv_start": (5, 0, 3, 64, 0, 7)}),
        ("fp8_combined", {**fp8, "spec": spec_of(combined_pool="pages_first")}),
        ("fp8_alibi_sinks", {**fp8, "alibi": True, "sinks": True}),
        ("fp8_soft_cap_negative_scale", {**fp8, "spec": spec_of(logits_soft_cap=5.0, sm_scale=-0.5)}),
        ("fp8_negative_scale", {**fp8, "spec": spec_of(sm_scale=-0.1)}),
        ("fp8_mask_positions", {**fp8, "custom_mask": True, "q_positions": True}),
        ("fp8_invariant", {**fp8, "spec": spec_of(batch_invariant=True)}),
        ("fp8_more_queries_than_keys", {**fp8, "kv_lens": (40, 0, 64, 1, 100, 9)}),
    ]


def _extend_features() -> list[Case]:
    """What extend does beyond the causal rule, alone and together, with windows that begin past the first tile."""
    few_keys = {"kv_lens": (40, 0, 64, 1, 100, 9)}
    tree = {"q_lens": (6,) * 6, **_NO_EMPTY, "tree": (-1, 0, 0, 1, 1, -1), "padding_tokens": 5}
    cases = [
        *(
            (f"dim_{dim}_{value}", {"spec": spec_of(head_dim=dim, v_head_dim=value)})
            for dim, value in (*itertools.product((64, 128, 192, 256), repeat=2), *_NARROW_WIDTHS)
        ),
        *(
            (f"dim_{dim}_group_{group}_page_{page}_{layout}", {"page_size": page, "spec": spec})
            for dim, group, page, layout in (
                (80, 7, 8, "HND"),
                (80, 5, 64, "NHD"),
                (80, 8, 256, "HND"),
                (96, 7, 32, "NHD"),
                (96, 1, 128, "HND"),
            )
            for spec in [spec_of(num_q_heads=2 * group, head_dim=dim, page_layout=layout)]
        ),
        (
            "dim_80_window_soft_cap_alibi",
            {"alibi": True, "spec": spec_of(head_dim=80, window_left=100, logits_soft_cap=5.0)},
        ),
        ("dim_96_custom_mask", {"custom_mask": True, "dtype": "float16", "spec": spec_of(head_dim=96)}),
        ("dim_80_combined_layers", {"spec": spec_of(head_dim=80, combined_pool="kv_first"), **_LAYERS}),
        ("page_256", {"page_size": 256}),
        ("page_256_dim_256_hnd", {"page_size": 256, "spec": spec_of(head_dim=256, page_layout="HND")}),
        ("combined_pages_first", {"spec": spec_of(combined_pool="pages_first")}),
        ("combined_kv_first", {"spec": spec_of(combined_pool="kv_first"), "num_layers": 2, "layer_index": 1}),
        *(
            (f"window_{left}_group_{group}", {"spec": spec_of(window_left=left, num_kv_heads=8 // group)})
            for left, group in itertools.product((0, 20, 200), (1, 4, 8))
        ),
        ("window_more_queries_than_keys", {"spec": spec_of(window_left=20), **few_keys}),
        ("window_of_both_sides", {"spec": spec_of(causal=False, window_left=70, window_right=30)}),
        ("window_right", {"spec": spec_of(causal=False, window_right=3)}),
        ("window_q_start", {"spec": spec_of(window_left=50), "q_start": (90, 0, 3, 64, 200, 1000)}),
        ("chunk", {"spec": spec_of(chunk_size=256), "kv_start": (5, 0, 3, 64, 0, 7)}),
        ("chunk_and_window", {"spec": spec_of(chunk_size=100, window_left=64, num_kv_heads=8)}),
        *((f"soft_cap_dim_{dim}", {"spec": spec_of(logits_soft_cap=5.0, head_dim=dim)}) for dim in (64, 128, 256)),
        ("soft_cap_negative_scale", {"spec": spec_of(logits_soft_cap=5.0, sm_scale=-0.5)}),
        ("alibi", {"alibi": True}),
        ("alibi_not_causal", {"alibi": True, "spec": spec_of(causal=False, num_kv_heads=8)}),
        ("alibi_q_start", {"alibi": True, "q_start": (90, 0, 3, 64, 200, 1000)}),
        ("alibi_window", {"alibi": True, "spec": spec_of(window_left=100)}),
        ("sinks", {"sinks": True}),
        ("scales", {"q_scale": "rows", "kv_scale": "rows", "num_layers": 2, "layer_index": 1}),
        ("q_positions", {"q_positions": True}),
        ("q_positions_window_alibi", {"q_positions": True, "alibi": True, "spec": spec_of(window_left=100)}),
        *(
            (f"custom_mask_dim_{dim}_group_{group}", {"custom_mask": True, "spec": spec})
            for dim, group in itertools.product((64, 128, 256), (1, 4, 8))
            for spec in [spec_of(head_dim=dim, num_kv_heads=8 // group)]
        ),
        ("custom_mask_window", {"custom_mask": True, "spec": spec_of(window_left=100)}),
        ("tree", {**tree, "spec": spec_of(num_q_heads=32, window_left=100)}),
        ("invariant", {"spec": spec_of(batch_invariant=True)}),
        *_extend_fp8(),
        *rotated(),
        (
            "all",
            {
                **_EVERYTHING,
                "custom_mask": True,
                "q_positions": True,
                "spec": spec_of(logits_soft_cap=5.0, window_left=300, head_dim=192, v_head_dim=128),
            },
        ),
    ]
    return [case_of("paged_extend", name, **fields) for name, fields in cases]


def _ragged_features() -> list[Case]:
    """Keys that are not paged, whose requests begin at any row, at sizes of arrays that divide by 8 and do not."""
    cases = [
        *(
            (f"{dtype}_dim_{dim}_{value}", {"dtype": dtype, "spec": spec_of(head_dim=dim, v_head_dim=value)})
            for dtype, (dim, value) in itertools.product(
                ("bfloat16", "float16"),
                ((64, 64), (80, 80), (96, 96), (80, 128), (128, 128), (192, 128), (192, 192), (256, 256)),
            )
        ),
        *(
            (f"group_{q}_of_{kv}", {"spec": spec_of(num_q_heads=q, num_kv_heads=kv)})
            for q, kv in ((2, 2), (5, 1), (32, 8))
        ),
        *((f"one_of_{keys}_keys", {"q_lens": (9,), "kv_lens": (keys,)}) for keys in (5, 128, 1000)),
        ("layers", {**_LAYERS}),
        ("encoder", {"spec": spec_of(causal=False), "kv_lens": (70, 1, 64, 0, 130, 9)}),
        ("window_of_both_sides", {"spec": spec_of(causal=False, window_left=70, window_right=30)}),
        ("window_soft_cap", {"spec": spec_of(window_left=200, logits_soft_cap=5.0)}),
        ("chunk", {"spec": spec_of(chunk_size=256), "kv_start": (5, 0, 3, 64, 0, 7)}),
        ("alibi_sinks", {"alibi": True, "sinks": True}),
        ("q_scale", {"q_scale": "rows", "kv_scale": "heads"}),
        ("custom_mask", {"custom_mask": True, "q_positions": True, "spec": spec_of(window_left=300)}),
        ("invariant", {"spec": spec_of(batch_invariant=True, window_left=200)}),
        *((f"fp8_{q}", {**FP8_ROWS, "dtype": q}) for q in ("bfloat16", "float16", *FP8)),
        ("fp8_window_soft_cap", {**FP8_ROWS, "spec": spec_of(window_left=200, logits_soft_cap=5.0)}),
        *((f"rope_dim_{dim}", {"spec": spec_of(head_dim=dim, rope_theta=1e4)}) for dim in (64, 128, 256)),
        ("rope_fp8_window", {**FP8_ROWS, "spec": spec_of(rope_theta=1e4, window_left=200)}),
        ("fp8_encoder", {**FP8_ROWS, "spec": spec_of(causal=False), "kv_lens": (70, 1, 64, 0, 130, 9)}),
    ]
    return [case_of("ragged_extend", name, **fields) for name, fields in cases]


_EVERYTHING = {
    "alibi": True,
    "sinks": True,
    "num_layers": 2,
    "layer_index": 1,
    "q_scale": "rows",
    "kv_scale": "rows",
    "spec": spec_of(logits_soft_cap=5.0, window_left=300, chunk_size=1024, page_layout="HND"),
}
_WIDTHS = ((80, 80), (96, 96), (192, 192), (192, 128), (64, 256))
_NARROW_WIDTHS = (
    (80, 80),
    (96, 96),
    (80, 96),
    (96, 80),
    (64, 80),
    (96, 64),
    (80, 128),
    (192, 96),
    (256, 80),
    (96, 256),
)
_LAYERS = {"num_layers": 2, "layer_index": 1}
_NO_EMPTY = {"kv_lens": (130, 6, 64, 7, 257, 1500)}  # each sequence holds the whole tree

KERNEL_SIZED: tuple[Case, ...] = (
    *_kernel_sized("paged_decode"),
    *_decode_features(),
    *(
        case_of("paged_decode", f"verify_{q}_group_{group}", q_lens=(q,) * 6, spec=spec_of(num_kv_heads=8 // group))
        for q, group in ((2, 1), (4, 8), (9, 8), (16, 8))
    ),
    *(
        # As many sequences, two of them padding, as extend's kernel needs to be given the call.
        case_of("paged_decode", f"verify_{q}_of_66", q_lens=(q,) * 64, kv_lens=tuple(n * 37 % 700 for n in range(64)))
        for q in (12, 16, 40)
    ),
    case_of("paged_decode", "verify_16_dim_256", q_lens=(16,) * 6, spec=spec_of(head_dim=256)),
    case_of("paged_decode", "one_long", kv_lens=(5000,), q_lens=(1,), spec=spec_of(num_q_heads=4, num_kv_heads=1)),
    case_of("paged_decode", "long_beside_short", kv_lens=(5000, *range(20)), q_lens=(1,) * 21),
    *_kernel_sized("paged_extend"),
    *_extend_features(),
    *_ragged_features(),
    *LATENT_CASES,
    case_of("paged_extend", "more_queries_than_keys", kv_lens=(40, 0, 64, 1, 100, 9)),
    case_of("paged_extend", "cross_attention", spec=spec_of(causal=False), kv_lens=(3, 1, 700, 0, 9, 130)),
)
