"""Batches and layers of the sizes that GPU kernels are made for."""

from typing import Any

from jattn_kernels import AttentionSpec
from tests.kernels.harness.case_table import Case

FP8 = ("float8_e4m3fn", "float8_e5m2")
FP8_KEYS = {"kv_dtype": "float8_e4m3fn", "kv_scale": "rows", "num_layers": 2, "layer_index": 1}
FP8_ROWS = {"kv_dtype": "float8_e4m3fn", "kv_scale": "heads"}
# Off, on and just past a tile's end, empty, and long enough to be split.
_LENS = (130, 1, 64, 0, 257, 1500)
_BATCHES: dict[Any, dict[str, Any]] = {
    "paged_decode": {"q_lens": (1,) * 6, "padding_rows": 2},
    "paged_extend": {"q_lens": (70, 1, 64, 0, 130, 9), "padding_rows": 1, "padding_tokens": 5},
    "ragged_extend": {"q_lens": (70, 1, 64, 0, 130, 9), "padding_rows": 1, "padding_tokens": 5},
}


def spec_of(**fields: Any) -> AttentionSpec:
    """Two KV heads of four query heads each, of width 128, unless said."""
    return AttentionSpec(**{"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, **fields})


def case_of(operation: Any, name: str, **fields: Any) -> Case:
    """A batch of the operation, in bfloat16 over pages of 16, unless said."""
    given = {"spec": spec_of(), "kv_lens": _LENS, "page_size": 16, "dtype": "bfloat16", **_BATCHES[operation], **fields}
    return Case(name=f"{operation}_{name}", operation=operation, **given)
