"""Extends that rotate queries and keys in the kernel."""

import itertools
from typing import Any

from tests.kernels.harness.kernel_sized_batches import FP8, FP8_KEYS, spec_of


def rotated() -> list[tuple[str, dict[str, Any]]]:
    """Keys rotated in the kernel: of all widths and dtypes, at positions near and far, beside other features."""
    far = {"kv_start": (5, 0, 3, 64, 0, 70_000)}
    dtypes = (("bfloat16", None), ("float16", None), ("bfloat16", FP8[0]), (FP8[1], FP8[1]))
    return [
        *(
            (f"rope_{q}_{kv}_dim_{dim}", {"dtype": q, "kv_dtype": kv, "spec": spec_of(head_dim=dim, rope_theta=1e4)})
            for (q, kv), dim in itertools.product(dtypes, (64, 128, 192, 256))
        ),
        *(
            (f"rope_page_{page_size}_hnd", {"page_size": page_size, "spec": spec_of(rope_theta=1e4, page_layout="HND")})
            for page_size in (8, 64, 256)
        ),
        ("rope_scale_far", {**far, "spec": spec_of(rope_theta=5e5, rope_scale=8.0)}),
        ("rope_q_positions", {**far, "q_positions": True, "spec": spec_of(rope_theta=1e4)}),
        ("rope_q_start", {"q_start": (90, 0, 3, 64, 200, 1000), "spec": spec_of(rope_theta=1e4)}),
        ("rope_dim_192_128", {"spec": spec_of(rope_theta=1e4, head_dim=192, v_head_dim=128)}),
        ("rope_not_causal_group_1", {"spec": spec_of(rope_theta=1e4, causal=False, num_kv_heads=8)}),
        ("rope_window_combined", {"spec": spec_of(rope_theta=1e4, window_left=100, combined_pool="kv_first")}),
        ("rope_alibi_cap", {"alibi": True, "spec": spec_of(rope_theta=1e4, logits_soft_cap=5.0, sm_scale=-0.5)}),
        (
            "rope_scales_layers",
            {"q_scale": "rows", "kv_scale": "rows", "num_layers": 2, "layer_index": 1, "spec": spec_of(rope_theta=1e4)},
        ),
        ("rope_fp8_scales", {**FP8_KEYS, **far, "q_scale": "rows", "spec": spec_of(rope_theta=1e4, window_left=100)}),
        ("rope_invariant", {"spec": spec_of(rope_theta=1e4, batch_invariant=True)}),
    ]
