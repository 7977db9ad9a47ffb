"""The one table of attention cases that every implementation is run over, and how close to the oracle it must come."""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jattn_kernels import reference
from jattn_kernels.spec import AttentionSpec

Operation = Literal["paged_decode", "paged_extend", "ragged_extend"]

# Static buckets are larger than what a batch needs: pages nobody owns, a page-table column, K/V rows, mask entries.
UNUSED_PAGES = 3
UNUSED_COLUMNS = 1
UNUSED_KEYS = 3
UNUSED_MASK = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attention call, without its numbers.

    Attributes:
        q_lens: New tokens a request; all equal in decode.
        kv_lens: Keys a request.
        num_layers: Layers of the pool, the wanted one holding the only numbers; None is a pool without that axis.
        kv_start, q_start: One value a request, or None to leave the argument out.
        custom_mask: Give a random mask.
        q_positions: Give each query a random position near the end of its request, several sharing one.
        padding_rows: Inert requests after the real ones; in decode they have queries (NaN) too.
        padding_tokens: Query rows (NaN) after the last request; not in decode.
    """

    name: str
    operation: Operation
    spec: AttentionSpec
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_size: int = 8
    dtype: str = "float32"
    num_layers: int | None = None
    layer_index: int | None = None
    kv_start: tuple[int, ...] | None = None
    q_start: tuple[int, ...] | None = None
    custom_mask: bool = False
    q_positions: bool = False
    padding_rows: int = 0
    padding_tokens: int = 0


class Inputs(NamedTuple):
    """Arguments ready for `jattn_kernels.<operation>` and `jattn_kernels.reference.<operation>`; add `return_lse`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def build(case: Case, seed: int = 0) -> Inputs:
    """The numbers of a case; NaN wherever no request owns the memory, but for page 0, which is zeros."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    spec = case.spec
    num_rows = len(case.kv_lens) + case.padding_rows
    kv_lens = np.array([*case.kv_lens, *[0] * case.padding_rows], np.int32)
    decode = case.operation == "paged_decode"
    q_lens = np.array([*case.q_lens, *[case.q_lens[0] if decode else 0] * case.padding_rows], np.int32)
    cu_q_lens = _offsets(q_lens)
    num_owned = sum(case.q_lens)
    num_queries = int(cu_q_lens[-1]) + case.padding_tokens

    q = np.full((num_queries, spec.num_q_heads, spec.head_dim), np.nan, np.float32)
    q[:num_owned] = rng.standard_normal(q[:num_owned].shape)
    widths = (spec.head_dim, spec.value_dim)
    keys_and_values = [
        [rng.standard_normal((length, spec.num_kv_heads, width)) for length in kv_lens] for width in widths
    ]
    kwargs: dict[str, Any] = {"spec": spec}
    for name in ("kv_start", "q_start"):
        if getattr(case, name) is not None:
            kwargs[name] = _ints([*getattr(case, name), *[0] * case.padding_rows])
    if case.custom_mask:
        kwargs["custom_mask"] = jnp.asarray(rng.random(int(q_lens @ kv_lens) + UNUSED_MASK) < 0.5)
    if case.q_positions:
        first = np.array(case.kv_start or [0] * len(case.kv_lens)) + case.kv_lens - np.array(case.q_lens)
        positions = np.zeros(num_queries, np.int32)
        positions[:num_owned] = np.repeat(first, case.q_lens) + rng.integers(0, max(case.q_lens), num_owned)
        kwargs["q_positions"] = _ints(positions)

    if case.operation == "ragged_extend":
        k, v = (_ragged(parts, dtype) for parts in keys_and_values)
        return Inputs((jnp.asarray(q).astype(dtype), k, v, _ints(cu_q_lens), _ints(_offsets(kv_lens))), kwargs)

    k_pages, v_pages, page_table = _paged(case, keys_and_values, kv_lens, rng, dtype)
    if case.layer_index is not None:
        kwargs["layer_index"] = _ints(case.layer_index)
    args = (k_pages, v_pages, page_table, _ints(kv_lens))
    if decode:
        queries = jnp.asarray(q.reshape(num_rows, -1, *q.shape[1:])).astype(dtype)
        if case.q_positions:
            kwargs["q_positions"] = kwargs["q_positions"].reshape(num_rows, -1)
        return Inputs((queries, *args), kwargs)
    return Inputs((jnp.asarray(q).astype(dtype), *args, _ints(cu_q_lens)), kwargs)


def oracle(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse in float64."""
    return getattr(reference, case.operation)(*inputs.args, **inputs.kwargs, return_lse=True)


def tolerances(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Absolute errors allowed in the output and the lse: [..., 1, 1] and [..., 1], one of each a query row.

    Twice the largest error, relative to a row's size, of dense float32 maths that rounds P and the output to the input
    dtype, plus a floor for sums in another order: sqrt(terms) float32 epsilons, and one rounding of the output.
    """
    exact_out, exact_lse = oracle(case, inputs)
    out, lse = _in_input_dtype(case, inputs)
    exact_lse, lse = (np.where(np.isneginf(exact_lse), 0.0, x) for x in (exact_lse, lse))
    out_size = np.abs(exact_out).max(axis=(-2, -1), keepdims=True)
    lse_size = np.maximum(1.0, np.abs(exact_lse).max(axis=-1, keepdims=True))
    float32_floor = math.sqrt(case.spec.head_dim + max(case.kv_lens)) * float(np.finfo(np.float32).eps)
    # A logit's rounding moves the output by that much relative to it, so the output's floor has the logits' size too.
    out_floor = float32_floor * lse_size[..., None] + float(jnp.finfo(case.dtype).eps) / 2
    out_error = (np.abs(out - exact_out) / np.where(out_size == 0, 1.0, out_size)).max()
    lse_error = (np.abs(lse - exact_lse) / lse_size).max()
    return (2 * out_error + out_floor) * out_size, (2 * lse_error + float32_floor) * lse_size


def assert_close(case: Case, inputs: Inputs, out: Any, lse: Any) -> None:
    """Asserts dtypes, shapes and values of an implementation's answer; -inf must be -inf, and nothing may be NaN."""
    exact_out, exact_lse = oracle(case, inputs)
    chex.assert_shape([out, lse], [exact_out.shape, exact_lse.shape])
    chex.assert_type([out, lse], [inputs.args[0].dtype, jnp.float32])
    out, lse = (np.asarray(x).astype(np.float64) for x in (out, lse))
    chex.assert_tree_all_finite(out)
    empty = np.isneginf(exact_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty, f"{case.name}: rows that see nothing")
    np.testing.assert_array_equal(out[empty], 0.0, f"{case.name}: output of rows that see nothing")
    out_atol, lse_atol = tolerances(case, inputs)
    lse, exact_lse = np.where(empty, 0.0, lse), np.where(empty, 0.0, exact_lse)
    for name, actual, exact, atol in (("out", out, exact_out, out_atol), ("lse", lse, exact_lse, lse_atol)):
        # Scaled so that 1 is the tolerance: the message then shows by how much it was missed.
        safe = np.maximum(atol, np.finfo(np.float64).tiny)
        np.testing.assert_allclose(
            actual / safe, exact / safe, rtol=0, atol=1, err_msg=f"{case.name}: {name} in units of its tolerance"
        )


def _in_input_dtype(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    args, kwargs = inputs
    q = np.asarray(args[0])
    if case.operation == "ragged_extend":
        requests = reference.ragged_requests(*args, **kwargs)
    elif case.operation == "paged_extend":
        requests = reference.paged_requests(*args, **kwargs)
    else:
        q, cu_q_lens, positions = reference.flatten_decode(q, kwargs.get("q_positions"))
        requests = reference.paged_requests(q, *args[1:], cu_q_lens, **{**kwargs, "q_positions": positions})
    out = np.zeros((len(q), case.spec.num_q_heads, case.spec.value_dim))
    lse = np.full(out.shape[:-1], -np.inf)
    for request in requests:
        out[request.rows], lse[request.rows] = _attend_rounded(request, case.spec, jnp.dtype(case.dtype))
    leading = inputs.args[0].shape[:-2]
    return out.reshape(*leading, *out.shape[1:]), lse.reshape(*leading, -1)


def _attend_rounded(request: reference.Request, spec: AttentionSpec, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    q, k, v = (x.astype(np.float32) for x in (request.q, request.k, request.v))
    k, v = (np.repeat(x, spec.group_size, axis=1) for x in (k, v))
    logits = np.float32(spec.scale) * np.einsum("qnh,snh->qns", q, k)
    if spec.logits_soft_cap is not None:
        logits = np.float32(spec.logits_soft_cap) * np.tanh(logits / np.float32(spec.logits_soft_cap))
    logits = np.where(request.visible[:, None, :], logits, np.float32(-np.inf))
    top = logits.max(axis=-1, initial=-np.inf)
    top = np.where(np.isneginf(top), np.float32(0), top)
    weights = np.exp(logits - top[..., None])
    total = weights.sum(axis=-1)
    safe_total = np.where(total == 0, np.float32(1), total)
    weights = weights.astype(dtype).astype(np.float32)
    out = np.einsum("qns,snh->qnh", weights, v) / safe_total[..., None]
    return out.astype(dtype).astype(np.float64), np.where(total == 0, -np.inf, top + np.log(safe_total))


def _ints(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _ragged(parts: list[np.ndarray], dtype: Any) -> jax.Array:
    unowned = np.full((UNUSED_KEYS, *parts[0].shape[1:]), np.nan)
    return jnp.asarray(np.concatenate([*parts, unowned]).astype(np.float32)).astype(dtype)


def _paged(case: Case, keys_and_values: list[list[np.ndarray]], kv_lens: np.ndarray, rng: Any, dtype: Any):
    spec, page_size = case.spec, case.page_size
    page_counts = -(-kv_lens // page_size)
    num_pages = 1 + int(page_counts.sum()) + UNUSED_PAGES
    numbers = iter(1 + rng.permutation(num_pages - 1))
    page_table = np.zeros((len(kv_lens), page_counts.max(initial=0) + UNUSED_COLUMNS), np.int32)
    for row, count in zip(page_table, page_counts, strict=True):
        row[:count] = [next(numbers) for _ in range(count)]
    pools = []
    for parts, width in zip(keys_and_values, (spec.head_dim, spec.value_dim), strict=True):
        pool = np.full((num_pages, page_size, spec.num_kv_heads, width), np.nan, np.float32)
        pool[0] = 0
        for row, part in zip(page_table, parts, strict=True):
            for s, token in enumerate(part):
                pool[row[s // page_size], s % page_size] = token
        pools.append(pool if spec.page_layout == "NHD" else pool.swapaxes(1, 2))
    if spec.combined_pool is not None:
        pools = [np.stack(pools, axis=1 if spec.combined_pool == "pages_first" else 0)]
    if case.num_layers is not None:
        pools = [_among_layers(pool, case) for pool in pools]
    k_pages, v_pages = (*(jnp.asarray(pool).astype(dtype) for pool in pools), None)[:2]
    return k_pages, v_pages, _ints(page_table)


def _among_layers(pool: np.ndarray, case: Case) -> np.ndarray:
    layers = np.full((case.num_layers, *pool.shape), np.nan, np.float32)
    layers[case.layer_index] = pool
    return layers


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, **fields})


# Off, on and just past a page's end (page_size 8), for requests long and short.
_BATCHES: dict[Operation, dict[str, Any]] = {
    "paged_decode": {"q_lens": (1, 1, 1, 1), "kv_lens": (13, 1, 16, 25)},
    "paged_extend": {"q_lens": (5, 1, 9, 16), "kv_lens": (13, 1, 25, 16)},
    "ragged_extend": {"q_lens": (5, 1, 9, 16), "kv_lens": (13, 1, 25, 16)},
}
_VERIFY = {"q_lens": (4, 4, 4, 4), "kv_lens": (13, 4, 16, 25)}
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
}

# Pairs that meet in the mask or in the logit, and positions that the lengths alone do not give.
_PAIRS: dict[str, dict[str, Any]] = {
    "window_and_chunk": {"spec": _spec(window_left=2, chunk_size=4)},
    "soft_cap_and_mask": {"spec": _spec(logits_soft_cap=5.0, sm_scale=1.0), "custom_mask": True},
    "mask_and_window": {"spec": _spec(window_left=6), "custom_mask": True},
    "kv_start_and_window": {"spec": _spec(window_left=6), "kv_start": (5, 2, 3, 64)},
    "kv_start_and_chunk": {"spec": _spec(chunk_size=8), "kv_start": (5, 2, 3, 64)},
}


def _case(name: str, operation: Operation, **fields: Any) -> Case:
    return Case(name=f"{operation}_{name}", operation=operation, **{"spec": _spec(), **_BATCHES[operation], **fields})


_decode = functools.partial(_case, operation="paged_decode")
_extend = functools.partial(_case, operation="paged_extend")
_ragged_extend = functools.partial(_case, operation="ragged_extend")

CASES: tuple[Case, ...] = (
    *(_case(name, operation, **fields) for operation in _BATCHES for name, fields in _FEATURES.items()),
    *(_extend(name, **fields) for name, fields in _PAIRS.items()),
    *(_decode(f"verify_{name}", **_VERIFY, **fields) for name, fields in _PAIRS.items()),
    _decode("verify", **_VERIFY, padding_rows=2),
    _decode("verify_tree", **_VERIFY, custom_mask=True, q_positions=True, spec=_spec(window_left=9), padding_rows=1),
    _decode("verify_more_than_keys", q_lens=(4,) * 4, kv_lens=(0, 1, 3, 8), spec=_spec(window_left=1)),
    _decode("lengths", q_lens=(1,) * 7, kv_lens=(0, 1, 7, 8, 9, 16, 17), padding_rows=2),
    _decode("giant", q_lens=(1,) * 5, kv_lens=_GIANT, page_size=16, dtype="bfloat16"),
    _decode("window_zero", spec=_spec(window_left=0)),
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
)


@st.composite
def _random_specs(draw: st.DrawFn, paged: bool) -> AttentionSpec:
    num_kv_heads = draw(st.integers(1, 3))
    causal = draw(st.booleans())
    combined_pool = draw(st.sampled_from((None, "pages_first", "kv_first"))) if paged else None
    return AttentionSpec(
        num_q_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=16,
        v_head_dim=None if combined_pool else draw(st.sampled_from((None, 8))),
        sm_scale=draw(st.sampled_from((None, 1.0))),
        logits_soft_cap=draw(st.sampled_from((None, 4.0))),
        causal=causal,
        window_left=draw(st.none() | st.integers(0, 20)),
        window_right=None if causal else draw(st.none() | st.integers(0, 20)),
        chunk_size=draw(st.none() | st.integers(1, 12)),
        page_layout=draw(st.sampled_from(("NHD", "HND"))) if paged else "NHD",
        combined_pool=combined_pool,
    )


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Small valid cases of every operation, features freely combined."""
    operation = draw(st.sampled_from(tuple(_BATCHES)))
    paged = operation != "ragged_extend"
    batch = draw(st.integers(1, 4))
    per_request = functools.partial(st.lists, min_size=batch, max_size=batch)
    if operation == "paged_decode":
        q_lens = [draw(st.integers(1, 4))] * batch
    else:
        q_lens = draw(per_request(st.integers(0, 12)))
    starts = st.none() | per_request(st.integers(0, 40)).map(tuple)
    num_layers = draw(st.none() | st.integers(1, 3)) if paged else None
    return Case(
        name=f"random_{operation}",
        operation=operation,
        spec=draw(_random_specs(paged)),
        q_lens=tuple(q_lens),
        kv_lens=tuple(draw(per_request(st.integers(0, 40)))),
        page_size=draw(st.sampled_from((1, 8, 16))),
        dtype=draw(st.sampled_from(("float32", "bfloat16", "float16"))),
        num_layers=num_layers,
        layer_index=None if num_layers is None else draw(st.integers(0, num_layers - 1)),
        kv_start=draw(starts),
        q_start=draw(starts),
        custom_mask=draw(st.booleans()),
        q_positions=draw(st.booleans()),
        padding_rows=draw(st.integers(0, 2)),
        # At least one query row in all.
        padding_tokens=0 if operation == "paged_decode" else draw(st.integers(not any(q_lens), 4)),
    )
