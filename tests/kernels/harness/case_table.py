"""The one table of attention cases that every implementation is run over."""

import functools
from typing import Any

from hypothesis import strategies as st

from jattn_kernels.call import Operation
from jattn_kernels.packed_latents import DTYPE as PACKED
from jattn_kernels.spec import AttentionSpec
from tests.kernels.harness.case import Case, Inputs, build
from tests.kernels.harness.tolerance import assert_close, oracle, tolerances

__all__ = ["CASES", "Case", "Inputs", "assert_close", "build", "by_name", "oracle", "random_cases", "tolerances"]


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, **fields})


def _mla_spec(**fields: Any) -> AttentionSpec:
    widths = {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 24, "v_head_dim": 16, "sm_scale": 0.3}
    return AttentionSpec(**{**widths, **fields})


# Off, on and just past a page's end (page_size 8), for requests long and short.
_BATCHES: dict[Operation, dict[str, Any]] = {
    "paged_decode": {"q_lens": (1, 1, 1, 1), "kv_lens": (13, 1, 16, 25)},
    "paged_extend": {"q_lens": (5, 1, 9, 16), "kv_lens": (13, 1, 25, 16)},
    "ragged_extend": {"q_lens": (5, 1, 9, 16), "kv_lens": (13, 1, 25, 16)},
    "mla_decode": {"q_lens": (1, 1, 1, 1), "kv_lens": (13, 1, 16, 25)},
    "mla_extend": {"q_lens": (5, 1, 9, 16), "kv_lens": (13, 1, 25, 16)},
}
_KV_OPERATIONS: tuple[Operation, ...] = ("paged_decode", "paged_extend", "ragged_extend")
_VERIFY = {"q_lens": (4, 4, 4, 4), "kv_lens": (13, 4, 16, 25)}
# Two branches, of which one splits again; the last node is a second root.
_TREE = {"q_lens": (6,) * 3, "kv_lens": (13, 6, 24), "tree": (-1, 0, 0, 1, 1, -1)}
_SINKS = {"spec": _spec(num_q_heads=16, num_kv_heads=2, head_dim=64), "kv_lens": (700, 70, 0, 9)}
_FP8_LAYERS = {"kv_scale": "rows", "num_layers": 3, "layer_index": 2}
_FP8_QUERIES = {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e5m2", "kv_scale": "scalar"}
_GIANT = (1, 300, 2, 0, 9)

# Each feature alone, on every operation.
_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16"},
    "not_causal": {"spec": _spec(causal=False)},
    "window": {"spec": _spec(window_left=3)},
    "window_of_both_sides": {"spec": _spec(causal=False, window_left=2, window_right=2)},
    "chunk": {"spec": _spec(chunk_size=4)},
    "custom_mask": {"custom_mask": True},
    "soft_cap": {"spec": _spec(logits_soft_cap=5.0, sm_scale=1.0)},
    "narrow_values": {"spec": _spec(v_head_dim=8)},
    "kv_start": {"kv_start": (5, 0, 3, 64), "q_start": (13, 0, 20, 79)},
    "q_positions": {"q_positions": True},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "rope": {"spec": _spec(rope_theta=1e4)},
    "fp8": {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "kv_scale": "heads"},
}

# Pairs that meet in the mask or in the logit, and positions that the lengths alone do not give.
_PAIRS: dict[str, dict[str, Any]] = {
    "window_and_chunk": {"spec": _spec(window_left=2, chunk_size=4)},
    "soft_cap_and_mask": {"spec": _spec(logits_soft_cap=5.0, sm_scale=1.0), "custom_mask": True},
    "mask_and_window": {"spec": _spec(window_left=6), "custom_mask": True},
    "kv_start_and_window": {"spec": _spec(window_left=6), "kv_start": (5, 2, 3, 64)},
    "kv_start_and_chunk": {"spec": _spec(chunk_size=8), "kv_start": (5, 2, 3, 64)},
    "alibi_and_soft_cap": {"spec": _spec(logits_soft_cap=2.0, sm_scale=1.0, causal=False), "alibi": True},
    "sinks_and_window": {"spec": _spec(window_left=2), "sinks": True, "dtype": "bfloat16"},
    "rope_and_kv_start": {"spec": _spec(rope_theta=5e5, rope_scale=8.0), "kv_start": (5, 2, 3, 70_000)},
}


def _case(name: str, operation: Operation, **fields: Any) -> Case:
    return Case(name=f"{operation}_{name}", operation=operation, **{"spec": _spec(), **_BATCHES[operation], **fields})


_decode = functools.partial(_case, operation="paged_decode")
_extend = functools.partial(_case, operation="paged_extend")
_ragged_extend = functools.partial(_case, operation="ragged_extend")
_mla_decode = functools.partial(_case, operation="mla_decode", spec=_mla_spec())
_mla_extend = functools.partial(_case, operation="mla_extend", spec=_mla_spec())
# A tile of packed rows, and a part of one.
_PACKED = {"spec": _mla_spec(head_dim=152, v_head_dim=144), "kv_dtype": PACKED}

CASES: tuple[Case, ...] = (
    *(_case(name, operation, **fields) for operation in _KV_OPERATIONS for name, fields in _FEATURES.items()),
    *(_extend(name, **fields) for name, fields in _PAIRS.items()),
    *(_decode(f"verify_{name}", **_VERIFY, **fields) for name, fields in _PAIRS.items()),
    _decode("verify", **_VERIFY, padding_rows=2),
    _decode("verify_tree", **_VERIFY, custom_mask=True, q_positions=True, spec=_spec(window_left=9), padding_rows=1),
    _decode("verify_more_than_keys", q_lens=(4,) * 4, kv_lens=(0, 1, 3, 8), spec=_spec(window_left=1)),
    _decode("lengths", q_lens=(1,) * 7, kv_lens=(0, 1, 7, 8, 9, 16, 17), padding_rows=2),
    _decode("giant", q_lens=(1,) * 5, kv_lens=_GIANT, page_size=16, dtype="bfloat16"),
    _decode("window_zero", spec=_spec(window_left=0)),
    _decode("mask_and_window", spec=_spec(num_q_heads=8, window_left=6), custom_mask=True, q_positions=True),
    _decode("group_1_dim_64", spec=_spec(num_kv_heads=4, head_dim=64), dtype="bfloat16", page_size=16),
    _decode("group_5", spec=_spec(num_q_heads=5, num_kv_heads=1)),
    _decode("group_8_dim_80", spec=_spec(num_q_heads=8, num_kv_heads=1, head_dim=80), dtype="float16"),
    _decode("page_size_1", page_size=1),
    _decode("hnd", spec=_spec(page_layout="HND")),
    _decode("combined_pages_first_hnd", spec=_spec(page_layout="HND", combined_pool="pages_first")),
    _decode("combined_kv_first_layers", spec=_spec(combined_pool="kv_first"), num_layers=3, layer_index=1),
    _decode("layers", num_layers=3, layer_index=2, dtype="bfloat16"),
    _extend("more_queries_than_keys", q_lens=(6, 3, 9, 2), kv_lens=(2, 0, 8, 17)),
    _extend("no_queries_in_the_middle", q_lens=(3, 0, 0, 8), kv_lens=(9, 11, 0, 16), custom_mask=True),
    _extend("padding", padding_rows=2, padding_tokens=5, custom_mask=True, q_positions=True),
    _extend("giant", q_lens=(1, 40, 2, 0, 9), kv_lens=_GIANT, page_size=16, dtype="bfloat16", padding_tokens=12),
    _extend("q_start_past_the_end", q_start=(40, 2, 16, 25)),
    _extend("queries_before_keys", kv_start=(8, 8, 8, 8), q_start=(0, 9, 7, 30)),
    _extend("group_4_dim_64", spec=_spec(num_q_heads=8, head_dim=64), dtype="bfloat16", page_size=16),
    _extend("group_1_dim_80", spec=_spec(num_kv_heads=4, head_dim=80), dtype="float16"),
    _extend("page_size_1_hnd", page_size=1, spec=_spec(page_layout="HND")),
    _extend("combined_pages_first_layers", spec=_spec(combined_pool="pages_first"), num_layers=2, layer_index=1),
    _extend("combined_kv_first_hnd", spec=_spec(page_layout="HND", combined_pool="kv_first")),
    _ragged_extend("padding", padding_rows=2, padding_tokens=5, custom_mask=True),
    _ragged_extend("giant", q_lens=(1, 40, 2, 0, 9), kv_lens=_GIANT, dtype="float16", padding_tokens=12),
    _ragged_extend("more_queries_than_keys", q_lens=(6, 3, 9, 2), kv_lens=(2, 0, 8, 17), spec=_spec(window_left=3)),
    _ragged_extend("group_5_dim_64", spec=_spec(num_q_heads=5, num_kv_heads=1, head_dim=64), dtype="bfloat16"),
    _decode("tree", **_TREE),
    _extend("tree", **_TREE, spec=_spec(window_left=3), padding_rows=1, padding_tokens=2),
    _decode("tree_rope", **_TREE, spec=_spec(rope_theta=1e4), alibi=True, dtype="bfloat16"),
    _decode("cross_attention", kv_lens=(9, 0, 16, 1), spec=_spec(causal=False)),
    _extend("cross_attention", q_lens=(3, 5, 0, 20), kv_lens=(17, 0, 8, 1), spec=_spec(causal=False)),
    _ragged_extend("cross_attention", q_lens=(3, 5, 0, 20), kv_lens=(17, 0, 8, 1), spec=_spec(causal=False)),
    _ragged_extend("encoder", q_lens=(9, 1, 0, 17), kv_lens=(9, 1, 0, 17), spec=_spec(causal=False), dtype="bfloat16"),
    _decode("fp8_e5m2_layers", **_FP8_LAYERS, dtype="float16", kv_dtype="float8_e5m2"),
    _extend("fp8_layers_hnd", **_FP8_LAYERS, kv_dtype="float8_e4m3fn", spec=_spec(page_layout="HND")),
    _decode("fp8_without_scales", dtype="bfloat16", kv_dtype="float8_e4m3fn", padding_rows=1),
    _decode("fp8_combined", dtype="bfloat16", kv_dtype="float8_e5m2", spec=_spec(combined_pool="kv_first")),
    _decode("fp8_queries", **_FP8_QUERIES, q_scale="heads", padding_rows=1),
    _extend("fp8_queries", **_FP8_QUERIES, q_scale="rows", padding_rows=1, padding_tokens=3),
    _ragged_extend("fp8_queries", **_FP8_QUERIES, q_scale="scalar", spec=_spec(rope_theta=1e4, logits_soft_cap=2.0)),
    _decode("sinks_dim_64", **_SINKS, dtype="bfloat16", page_size=16, sinks="layers", num_layers=3, layer_index=1),
    _extend("sinks_layers", sinks="layers", num_layers=2, layer_index=1),
    _mla_decode("sinks_layers", sinks="layers", num_layers=2, layer_index=1),
    _decode("fp8_sinks_alibi", dtype="bfloat16", kv_dtype="float8_e4m3fn", kv_scale="scalar", sinks=True, alibi=True),
    _mla_decode("plain", padding_rows=1),
    _mla_decode("bfloat16_layers", dtype="bfloat16", num_layers=3, layer_index=1, page_size=1),
    _mla_decode("verify_window", **_VERIFY, spec=_mla_spec(window_left=5), sinks=True),
    _mla_decode("tree", **_TREE, dtype="bfloat16"),
    _mla_decode("fp8_layers", **_FP8_LAYERS, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    _mla_decode("packed_layers", **_PACKED, dtype="bfloat16", num_layers=3, layer_index=1, padding_rows=1),
    _mla_decode("packed_verify", **_VERIFY, **_PACKED, q_scale="rows", sinks=True),
    _mla_extend("packed", **_PACKED, dtype="bfloat16", page_size=1, padding_rows=1, padding_tokens=3),
    _mla_extend("plain", padding_rows=1, padding_tokens=3),
    _mla_extend("more_queries_than_keys", q_lens=(6, 3, 9, 2), kv_lens=(2, 0, 8, 17), dtype="bfloat16"),
    _mla_extend("soft_cap_kv_start", kv_start=(5, 0, 3, 64), spec=_mla_spec(logits_soft_cap=2.0), custom_mask=True),
    _mla_extend("fp8_queries", **_FP8_QUERIES, q_scale="rows"),
)


def by_name(*names: str) -> list[Case]:
    """Cases of the table, in its order."""
    found = [case for case in CASES if case.name in names]
    assert len(found) == len(names)
    return found


@st.composite
def _random_specs(draw: st.DrawFn, operation: Operation) -> AttentionSpec:
    paged, mla = operation.startswith("paged"), operation.startswith("mla")
    num_kv_heads = 1 if mla else draw(st.integers(1, 3))
    causal = draw(st.booleans())
    combined_pool = draw(st.sampled_from((None, "pages_first", "kv_first"))) if paged else None
    rope_theta = None if mla else draw(st.sampled_from((None, None, 1e4, 5e5)))
    return AttentionSpec(
        num_q_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=16,
        v_head_dim=8 if mla else None if combined_pool else draw(st.sampled_from((None, 8))),
        sm_scale=1.0 if mla else draw(st.sampled_from((None, 1.0))),
        logits_soft_cap=draw(st.sampled_from((None, 4.0))),
        causal=causal,
        window_left=draw(st.none() | st.integers(0, 20)),
        window_right=None if causal else draw(st.none() | st.integers(0, 20)),
        chunk_size=draw(st.none() | st.integers(1, 12)),
        rope_theta=rope_theta,
        rope_scale=1.0 if rope_theta is None else draw(st.sampled_from((1.0, 4.0))),
        page_layout=draw(st.sampled_from(("NHD", "HND"))) if paged else "NHD",
        combined_pool=combined_pool,
    )


_FP8 = ("float8_e4m3fn", "float8_e5m2")


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Small valid cases of every operation, features freely combined."""
    operation = draw(st.sampled_from(tuple(_BATCHES)))
    paged = operation != "ragged_extend"
    decode = operation.endswith("decode")
    batch = draw(st.integers(1, 4))
    per_request = functools.partial(st.lists, min_size=batch, max_size=batch)
    if decode:
        q_lens = [draw(st.integers(1, 4))] * batch
    else:
        q_lens = draw(per_request(st.integers(0, 12)))
    starts = st.none() | per_request(st.integers(0, 40)).map(tuple)
    num_layers = draw(st.none() | st.integers(1, 3)) if paged else None
    kv_dtype = draw(st.sampled_from((None, None, *_FP8, *((PACKED,) if operation.startswith("mla") else ()))))
    scales = ("scalar", "heads", None)
    kv_scales = (None,) if kv_dtype == PACKED else scales if num_layers is None else (*scales, "rows")
    return Case(
        name=f"random_{operation}",
        operation=operation,
        spec=draw(_random_specs(operation)),
        q_lens=tuple(q_lens),
        kv_lens=tuple(draw(per_request(st.integers(0, 40)))),
        page_size=draw(st.sampled_from((1, 8, 16))),
        dtype=draw(st.sampled_from(("float32", "bfloat16", "float16", *(_FP8 if kv_dtype in _FP8 else ())))),
        kv_dtype=kv_dtype,
        q_scale=draw(st.sampled_from((*scales, "rows"))),
        kv_scale=draw(st.sampled_from(kv_scales)),
        num_layers=num_layers,
        layer_index=None if num_layers is None else draw(st.integers(0, num_layers - 1)),
        kv_start=draw(starts),
        q_start=draw(starts),
        custom_mask=draw(st.booleans()),
        q_positions=draw(st.booleans()),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        padding_rows=draw(st.integers(0, 2)),
        # At least one query row in all.
        padding_tokens=0 if decode else draw(st.integers(not any(q_lens), 4)),
    )
