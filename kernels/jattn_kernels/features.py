"""Which implementation serves which feature: asked of dispatch, never written down."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jattn_kernels.call import AttentionCall, Device, Operation
from jattn_kernels.dispatch import implementations
from jattn_kernels.packed_latents import DTYPE as PACKED
from jattn_kernels.spec import AttentionSpec

DEVICES: Mapping[str, Device] = {
    "Hopper": Device("gpu", (9, 0)),
    "other NVIDIA": Device("gpu", (8, 0)),
    "CPU": Device("cpu"),
}

_SPEC = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
_MLA_SPEC = AttentionSpec(num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, sm_scale=192**-0.5)
_FP8 = "float8_e4m3fn"
_ALL_FP8: dict[str, Any] = {"q_dtype": _FP8, "kv_dtype": _FP8, "options": ("q_scale", "k_scale", "v_scale")}


class FeatureRow(NamedTuple):
    """One feature, and for each implementation None if it serves the feature, or the sentence that refuses it."""

    feature: str
    refusals: Mapping[str, str | None]


def _calls(
    *operations: Operation,
    options: tuple[str, ...] = (),
    q_dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
    page_size: int = 16,
    **spec: Any,
) -> tuple[AttentionCall, ...]:
    return tuple(
        AttentionCall(
            operation=operation,
            spec=dataclasses.replace(_MLA_SPEC if operation.startswith("mla") else _SPEC, **spec),
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            page_size=None if operation == "ragged_extend" else page_size,
            features=frozenset(options),
            device=DEVICES["CPU"],
        )
        for operation in operations or ("paged_decode", "paged_extend")
    )


# A feature is served by what refuses none of its calls; without operations named, those are decode and extend.
FEATURES: Mapping[str, tuple[AttentionCall, ...]] = {
    "decode": _calls("paged_decode"),
    "extend over pages": _calls("paged_extend"),
    "extend over ragged keys": _calls("ragged_extend"),
    "absorbed MLA, decode": _calls("mla_decode"),
    "absorbed MLA, extend": _calls("mla_extend"),
    "one of stacked layers": _calls(options=("layer_index",)),
    "float16": _calls(q_dtype="float16", kv_dtype="float16"),
    "float32": _calls(q_dtype="float32", kv_dtype="float32"),
    "fp8 pages, decode": _calls("paged_decode", kv_dtype=_FP8, options=("k_scale", "v_scale")),
    "fp8 pages, extend": _calls("paged_extend", kv_dtype=_FP8, options=("k_scale", "v_scale")),
    "fp8 pages and queries, decode": _calls("paged_decode", **_ALL_FP8),
    "fp8 pages and queries, extend": _calls("paged_extend", **_ALL_FP8),
    "fp8 latent pages": _calls("mla_decode", "mla_extend", kv_dtype=_FP8, options=("k_scale", "v_scale")),
    "latent pages with a scale for each tile": _calls("mla_decode", "mla_extend", kv_dtype=PACKED),
    "pages of one token": _calls(page_size=1),
    "heads before tokens in a page (HND)": _calls(page_layout="HND"),
    "K and V in one pool": _calls(combined_pool="pages_first"),
    "values narrower than keys": _calls(v_head_dim=64),
    "cross attention over pages": _calls(causal=False),
    "encoder": _calls("ragged_extend", causal=False),
    "sliding window": _calls(window_left=1023),
    "window of both sides": _calls(causal=False, window_left=511, window_right=511),
    "chunked attention": _calls(chunk_size=8192),
    "custom mask": _calls(options=("custom_mask",)),
    "trees of draft tokens": _calls("paged_decode", options=("custom_mask", "q_positions")),
    "parts of a sequence": _calls(options=("q_start", "kv_start")),
    "shared prefix": (*_calls("paged_extend", causal=False), *_calls("paged_decode", options=("kv_start",))),
    "logits soft cap": _calls(logits_soft_cap=50.0),
    "ALiBi": _calls(options=("alibi_slopes",)),
    "sinks": _calls(options=("sinks",)),
    "rotary embedding in the kernel, decode": _calls("paged_decode", rope_theta=1e4),
    "rotary embedding in the kernel, extend": _calls("paged_extend", rope_theta=1e4),
    "latent rows: norm, rotary embedding and page write in one": _calls("mla_write"),
    "rotary embedding with the page write": _calls("rotate_and_write"),
    "norms of heads before they turn": _calls("rotate_and_write", options=("head_norms",)),
    "batch-invariant results": _calls(batch_invariant=True),
}


def feature_table(device: Device = DEVICES["Hopper"]) -> list[FeatureRow]:
    """What each implementation says to each feature on a kind of device."""
    rows = []
    for feature, calls in FEATURES.items():
        on_device = [dataclasses.replace(call, device=device) for call in calls]
        refusals = {
            entry.name: next((sentence for call in on_device if (sentence := entry.refuses(call))), None)
            for entry in implementations()
        }
        rows.append(FeatureRow(feature, refusals))
    return rows


def feature_markdown() -> str:
    """A table in Markdown: a row a feature, and on which devices each implementation serves it."""
    tables = {name: feature_table(device) for name, device in DEVICES.items()}
    names = [entry.name for entry in implementations()]
    lines = [("feature", *names), (":--",) * (1 + len(names))]
    for same_feature in zip(*tables.values(), strict=True):
        served = [
            [device for device, row in zip(tables, same_feature, strict=True) if row.refusals[name] is None]
            for name in names
        ]
        lines.append((same_feature[0].feature, *(", ".join(devices) or "no" for devices in served)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
