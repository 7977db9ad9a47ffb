"""The calls that the Triton kernels are compiled for: main configurations, and every case of the shared table."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jattn_kernels
from jattn_kernels import AttentionSpec, Splits, peers
from jattn_kernels.inbox import Inbox
from tests.kernels.harness.case_table import CASES, Case, build

Call = Callable[[], Any]
_FP8 = "float8_e4m3fn"


def triton_cases() -> dict[str, Call]:
    """By name, what launches a case's kernels."""
    return MAIN | {f"{case.operation}/{case.name}": functools.partial(_table_case, case) for case in CASES}


def _table_case(case: Case) -> Any:
    args, kwargs = build(case)
    return getattr(jattn_kernels, case.operation)(*args, **kwargs, implementation="triton")


def _array(shape: tuple[int, ...], dtype: str = "int32") -> jax.Array:
    return jnp.zeros(shape, dtype)


def _attention(
    operation: str,
    *,
    heads: tuple[int, int] = (32, 8),
    d: int = 128,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    page_size: int = 16,
    tokens: int = 1,
    **spec: Any,
) -> Any:
    """A call of 8 sequences, or 2,048 tokens of extend, over a pool of 64 pages."""
    facts = AttentionSpec(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=d, **spec)
    leading = (8, tokens) if operation.endswith("decode") else (2048,)
    pages = _array((64, page_size, heads[1], d), kv_dtype or dtype)
    args = [_array((*leading, heads[0], d), dtype), pages, pages, _array((8, 8)), _array((8,))]
    if operation.endswith("extend"):
        args.append(_array((9,)))
    return getattr(jattn_kernels, operation)(*args, spec=facts, implementation="triton")


def _ragged(*, heads: tuple[int, int] = (32, 8), d: int = 128, v_d: int | None = None, dtype: str = "bfloat16") -> Any:
    spec = AttentionSpec(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=d, v_head_dim=v_d)
    q, k, v = (_array((2048, *facts), dtype) for facts in ((heads[0], d), (heads[1], d), (heads[1], v_d or d)))
    return jattn_kernels.ragged_extend(q, k, v, _array((9,)), _array((9,)), spec=spec, implementation="triton")


def _latent(
    operation: str, *, heads: int, tokens: int = 1, kv_dtype: str = "bfloat16", page_size: int = 64, seqs: int = 8
) -> Any:
    spec = AttentionSpec(num_q_heads=heads, num_kv_heads=1, head_dim=576, v_head_dim=512, sm_scale=192**-0.5)
    leading = (seqs, tokens) if operation.endswith("decode") else (2048,)
    q, q_pe = _array((*leading, heads, 512), "bfloat16"), _array((*leading, heads, 64), "bfloat16")
    args = [q, q_pe, _array((64, page_size, 576), kv_dtype), _array((seqs, 8)), _array((seqs,))]
    if operation.endswith("extend"):
        args.append(_array((seqs + 1,)))
    return getattr(jattn_kernels, operation)(*args, spec=spec, implementation="triton")


def _norm(rows: int, columns: int, dtype: str = "bfloat16") -> Any:
    x, scales = _array((rows, columns), dtype), _array((4, columns), dtype)
    return jattn_kernels.rms_norm(x, scales, eps=1e-6, layer_index=_array(()), implementation="triton")


def _rotary(
    tokens: int,
    *,
    heads: tuple[int, int] = (32, 8),
    d: int = 128,
    page_size: int = 16,
    kv_dtype: str = "bfloat16",
    normed: bool = False,
) -> Any:
    qkv, angles = _array((tokens, heads[0] + 2 * heads[1], d), "bfloat16"), _array((tokens, d // 2), "float32")
    pages, scale = _array((2, 64, page_size, heads[1], d), kv_dtype), _array((2, d), "bfloat16")
    norms = jattn_kernels.HeadNorms(q_scale=scale, k_scale=scale, layer_index=_array(()), eps=1e-6)
    return jattn_kernels.rotate_and_write(
        qkv,
        angles,
        angles,
        pages,
        pages,
        _array((tokens,)),
        num_kv_heads=heads[1],
        layer_index=_array(()),
        norms=norms if normed else None,
        implementation="triton",
    )


def _mixture(tokens: int, *, experts: int = 128, hidden: int = 2048, units: int = 768, per_token: int = 8) -> Any:
    """By default Qwen3-30B-A3B's."""
    return jattn_kernels.mixture_of_experts(
        _array((tokens, hidden), "bfloat16"),
        _array((tokens, per_token), "float32"),
        _array((tokens, per_token)),
        _array((2, experts, hidden, 2 * units), "bfloat16"),
        _array((2, experts, units, hidden), "bfloat16"),
        layer_index=_array(()),
        implementation="triton",
    )


def _filters(rows: int, vocab_size: int) -> Any:
    number = _array((rows,), "float32")
    return jattn_kernels.kept_tokens(
        _array((rows, vocab_size), "float32"),
        temperature=number,
        top_k=_array((rows,)),
        top_p=number,
        min_p=number,
        implementation="triton",
    )


def _exchanged(what: str, rows: int, *, devices: int = 2, dtype: str = "bfloat16", splits: int = 0) -> Any:
    """What several GPUs exchange of rows of 4,096 numbers."""
    inbox, x = Inbox.of(devices), _array((rows, 4096), dtype)
    table = jnp.zeros(2 * devices + 2, jnp.uint32)
    if what != "add_norm":
        return getattr(peers, what)(x, table, inbox=inbox)
    addition: Any = x
    if splits:
        parts = _array((splits, -(-rows // 4) * 4, 4096), "float32")
        addition = Splits(parts=parts, num_rows=rows, dtype=x.dtype)
    scale = _array((4, 4096), dtype)
    return peers.all_reduce_add_norm(x, addition, scale, table, inbox=inbox, eps=1e-6, layer_index=_array(()))


_decode = functools.partial(functools.partial, _attention, "paged_decode")
_extend = functools.partial(functools.partial, _attention, "paged_extend")

MAIN: dict[str, Call] = {
    "decode": _decode(),
    "decode_page_1": _decode(page_size=1),
    "decode_group_8": _decode(heads=(64, 8)),
    "decode_4_tokens": _decode(tokens=4),
    "decode_16_tokens": _decode(tokens=16),
    "decode_float16": _decode(dtype="float16"),
    "decode_float32": _decode(dtype="float32"),
    "decode_fp8": _decode(kv_dtype=_FP8),
    "decode_64": _decode(d=64),
    "decode_80": _decode(d=80, heads=(32, 32)),
    "decode_256": _decode(d=256, heads=(16, 8)),
    "decode_window": _decode(window_left=1023),
    "decode_rope": _decode(rope_theta=1e4),
    "extend": _extend(),
    "extend_page_1": _extend(page_size=1),
    "extend_float32": _extend(dtype="float32"),
    "extend_fp8": _extend(kv_dtype=_FP8),
    "extend_64": _extend(d=64),
    "extend_80": _extend(d=80, heads=(32, 32)),
    "extend_96": _extend(d=96, heads=(32, 32)),
    "extend_256": _extend(d=256, heads=(16, 8)),
    "extend_window": _extend(window_left=1023),
    "extend_soft_cap": _extend(logits_soft_cap=50.0),
    "extend_rope": _extend(rope_theta=1e4),
    "ragged": functools.partial(_ragged),
    "ragged_256": functools.partial(_ragged, heads=(16, 8), d=256),
    "ragged_192_128": functools.partial(_ragged, heads=(16, 16), d=192, v_d=128),
    "mla_decode_16": functools.partial(_latent, "mla_decode", heads=16),
    "mla_decode_128": functools.partial(_latent, "mla_decode", heads=128),
    "mla_decode_16_of_many": functools.partial(_latent, "mla_decode", heads=16, seqs=64),
    "mla_decode_32_of_many": functools.partial(_latent, "mla_decode", heads=32, seqs=64),
    "mla_decode_128_of_many": functools.partial(_latent, "mla_decode", heads=128, seqs=64),
    "mla_decode_128_2_tokens": functools.partial(_latent, "mla_decode", heads=128, tokens=2),
    "mla_decode_fp8": functools.partial(_latent, "mla_decode", heads=16, kv_dtype=_FP8),
    "mla_extend_16": functools.partial(_latent, "mla_extend", heads=16),
    "mla_extend_128": functools.partial(_latent, "mla_extend", heads=128),
    **{f"mixture_qwen3_{tokens}": functools.partial(_mixture, tokens) for tokens in (1, 64, 2048)},
    **{
        f"mixture_mixtral_{tokens}": functools.partial(
            _mixture, tokens, experts=8, hidden=4096, units=14336, per_token=2
        )
        for tokens in (1, 64, 2048)
    },
    "norm_4096": functools.partial(_norm, 256, 4096),
    "norm_8192": functools.partial(_norm, 64, 8192),
    "norm_of_heads_128": functools.partial(_norm, 2048, 128),
    "norm_5120_float32": functools.partial(_norm, 64, 5120, "float32"),
    "rotate_and_write_1": functools.partial(_rotary, 1),
    "rotate_and_write_8192": functools.partial(_rotary, 8192),
    "rotate_and_write_page_1": functools.partial(_rotary, 64, page_size=1),
    "rotate_and_write_normed": functools.partial(_rotary, 64, normed=True),
    "rotate_and_write_fp8": functools.partial(_rotary, 64, kv_dtype=_FP8),
    "filters_128256": functools.partial(_filters, 64, 128_256),
    "filters_50257": functools.partial(_filters, 64, 50_257),
    "filters_4096": functools.partial(_filters, 64, 4096),
    **{f"all_reduce_{rows}": functools.partial(_exchanged, "all_reduce", rows) for rows in (1, 256, 8192)},
    "all_reduce_float32": functools.partial(_exchanged, "all_reduce", 256, dtype="float32"),
    "all_reduce_one_shot_of_8": functools.partial(_exchanged, "all_reduce", 1, devices=8),
    "all_reduce_two_shots_of_8": functools.partial(_exchanged, "all_reduce", 256, devices=8),
    "all_gather": functools.partial(_exchanged, "all_gather", 64, dtype="float32"),
    **{f"add_norm_{rows}": functools.partial(_exchanged, "add_norm", rows) for rows in (1, 8192)},
    "add_norm_splits": functools.partial(_exchanged, "add_norm", 8, splits=4),
    "add_norm_of_8": functools.partial(_exchanged, "add_norm", 64, devices=8),
}
