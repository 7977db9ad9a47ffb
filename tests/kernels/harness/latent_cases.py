"""Cases of absorbed MLA at the sizes of Hopper's kernels; in a file of their own, as their widths are."""

import dataclasses
import itertools
from typing import Any

from jattn_kernels import AttentionSpec
from tests.kernels.harness.case_table import Case

_LENS = (130, 1, 64, 0, 257, 1500)
_VERIFY = {"q_lens": (3,) * 6, "kv_lens": (130, 3, 64, 0, 257, 1500)}
_FP8 = {"kv_dtype": "float8_e4m3fn", "kv_scale": "rows", "num_layers": 2, "layer_index": 1, "page_size": 64}
_PACKED = {"kv_dtype": "uint8", "num_layers": 2, "layer_index": 1, "page_size": 64}
_EVERYTHING = {"sinks": True, "q_scale": "rows", "kv_scale": "rows", "num_layers": 2, "layer_index": 1}


def latent_case(name: str, heads: int, *, spec: dict[str, Any] | None = None, **fields: Any) -> Case:
    """A batch of DeepSeek's widths, in bfloat16 over pages of 16, unless said."""
    facts = {"num_q_heads": heads, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "sm_scale": 192**-0.5}
    given = {"q_lens": (1,) * 6, "kv_lens": _LENS, "padding_rows": 2, "page_size": 16, "dtype": "bfloat16", **fields}
    return Case(name=f"mla_decode_{name}", operation="mla_decode", spec=AttentionSpec(**facts | (spec or {})), **given)


def _cases_of(heads: int) -> list[Case]:
    return [
        latent_case(f"{name}_of_{heads}", heads, **fields)
        for name, fields in (
            ("page_32_float16", {"page_size": 32, "dtype": "float16"}),
            ("page_64", {"page_size": 64}),
            ("page_128_layers", {"page_size": 128, "num_layers": 2, "layer_index": 1}),
            ("verify", _VERIFY),
            ("window_kv_start", {**_VERIFY, "spec": {"window_left": 200}, "kv_start": (5, 0, 3, 0, 0, 7)}),
            ("mask", {**_VERIFY, "custom_mask": True, "q_positions": True}),
            ("everything", {**_VERIFY, **_EVERYTHING, "spec": {"logits_soft_cap": 5.0, "chunk_size": 100}}),
            ("invariant", {"spec": {"batch_invariant": True}, "kv_lens": (1024, 1, 64, 0, 1025, 3000)}),
        )
    ]


def _extend_case(name: str, heads: int, **fields: Any) -> Case:
    """Ragged queries of the same: no group of tokens, one that is not full, and several."""
    extend = {"q_lens": (70, 1, 64, 0, 130, 9), "padding_rows": 1, "padding_tokens": 5, **fields}
    case = latent_case(name, heads, **extend)
    return dataclasses.replace(case, name=f"mla_extend_{name}", operation="mla_extend")


def _extend_cases_of(heads: int) -> list[Case]:
    return [
        _extend_case(f"{name}_of_{heads}", heads, **fields)
        for name, fields in (
            ("page_32_float16", {"page_size": 32, "dtype": "float16"}),
            ("page_128_layers", {"page_size": 128, "num_layers": 2, "layer_index": 1}),
            ("window_kv_start", {"spec": {"window_left": 200}, "kv_start": (5, 0, 3, 0, 0, 7)}),
            ("positions", {"q_positions": True}),
            ("everything", {**_EVERYTHING, "spec": {"logits_soft_cap": 5.0, "chunk_size": 100}}),
            ("invariant", {"spec": {"batch_invariant": True}}),
        )
    ]


LATENT_CASES = [
    *(latent_case(f"heads_{heads}", heads) for heads in (5, 8, 16, 32, 64, 128)),
    *itertools.chain.from_iterable(map(_cases_of, (16, 64))),
    latent_case("alibi_of_64", 64, alibi=True),
    latent_case("several_blocks_of_rows", 40, **_VERIFY),
    *(latent_case(f"fp8_of_{heads}", heads, **_FP8) for heads in (8, 16)),
    latent_case("fp8_everything", 4, **_FP8, **_VERIFY, sinks=True, q_scale="rows", spec={"window_left": 200}),
    latent_case("fp8_invariant", 16, kv_dtype="float8_e4m3fn", spec={"batch_invariant": True}),
    *(latent_case(f"fp8_of_{heads}", heads, **_FP8) for heads in (64, 128)),
    latent_case("fp8_mask_of_64", 64, **_FP8 | {"page_size": 16}, **_VERIFY, custom_mask=True, q_positions=True),
    latent_case("fp8_verify_of_64", 64, **_FP8 | {"page_size": 128}, **_VERIFY),
    _extend_case("fp8_of_128", 128, **_FP8),
    *(latent_case(f"packed_of_{heads}", heads, **_PACKED) for heads in (8, 16, 64, 128)),
    latent_case("packed_mask_of_64", 64, **_PACKED | {"page_size": 16}, **_VERIFY, custom_mask=True, q_positions=True),
    latent_case("packed_window", 16, **_PACKED, **_VERIFY, sinks=True, q_scale="rows", spec={"window_left": 200}),
    latent_case("packed_invariant", 16, kv_dtype="uint8", spec={"batch_invariant": True}),
    *(_extend_case(f"packed_of_{heads}", heads, **_PACKED | {"page_size": 32}) for heads in (16, 128)),
    *(_extend_case(f"heads_{heads}", heads) for heads in (5, 16, 32, 64, 128)),
    *itertools.chain.from_iterable(map(_extend_cases_of, (16, 128))),
]
