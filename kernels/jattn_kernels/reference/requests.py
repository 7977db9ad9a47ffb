"""One request after the other, cut out of a batch in any of the forms in which kernels take it."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jattn_kernels.reference.masks import visible_keys
from jattn_kernels.reference.packed_rows import unpacked
from jattn_kernels.spec import AttentionSpec

KeysAndValues = Iterator[tuple[np.ndarray, np.ndarray]]


class Request(NamedTuple):
    """One request, with what fp8 stands for in place of fp8.

    Attributes:
        rows: Where its queries sit among all query rows.
        q: Its queries, float64 [Q, N, H].
        k: Its keys, float64 [S, K, H]; none past its length.
        v: Its values, float64 [S, K, Hv].
        p: Absolute positions of its queries [Q].
        j: Absolute positions of its keys [S].
        visible: Which key each query sees, bool [Q, S].
        alibi_slopes, sinks: Float64 [N], or None.
    """

    rows: slice
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    p: np.ndarray
    j: np.ndarray
    visible: np.ndarray
    alibi_slopes: np.ndarray | None
    sinks: np.ndarray | None


class Options(NamedTuple):
    """The optional arguments of a call."""

    layer_index: Any = None
    q_start: Any = None
    kv_start: Any = None
    q_positions: Any = None
    custom_mask: Any = None
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    alibi_slopes: Any = None
    sinks: Any = None


def _paged_decode(q: Any, k_pages: Any, v_pages: Any, page_table: Any, seq_lens: Any, *, spec, **options):
    q, cu_q_lens, options = flatten_decode(q, options)
    return _paged_extend(q, k_pages, v_pages, page_table, seq_lens, cu_q_lens, spec=spec, **options)


def _paged_extend(
    q: Any, k_pages: Any, v_pages: Any, page_table: Any, seq_lens: Any, cu_q_lens: Any, *, spec, **options
):
    given = Options(**options)
    k_pages, v_pages = split_pools(k_pages, v_pages, spec=spec, layer_index=given.layer_index)
    lengths = np.asarray(seq_lens)
    keys_and_values = gather_requests(k_pages, v_pages, np.asarray(page_table), lengths)
    return _requests(q, cu_q_lens, lengths, keys_and_values, given, spec)


def _ragged_extend(q: Any, k: Any, v: Any, cu_q_lens: Any, cu_kv_lens: Any, *, spec, **options):
    given = Options(**options)
    k, v = (one_layer(x, given.layer_index) for x in (k, v))
    bounds = np.asarray(cu_kv_lens)
    keys_and_values = ((k[a:b], v[a:b]) for a, b in itertools.pairwise(bounds))
    return _requests(q, cu_q_lens, np.diff(bounds), keys_and_values, given, spec)


def _mla_decode(q_nope: Any, q_pe: Any, latent_pages: Any, page_table: Any, seq_lens: Any, *, spec, **options):
    q_nope, cu_q_lens, options = flatten_decode(q_nope, options)
    q_pe = np.asarray(q_pe).reshape(*q_nope.shape[:-1], -1)
    return _mla_extend(q_nope, q_pe, latent_pages, page_table, seq_lens, cu_q_lens, spec=spec, **options)


def _mla_extend(
    q_nope: Any,
    q_pe: Any,
    latent_pages: Any,
    page_table: Any,
    seq_lens: Any,
    cu_q_lens: Any,
    *,
    spec,
    kv_scale: Any = None,
    **options,
):
    given = Options(k_scale=kv_scale, v_scale=kv_scale, **options)
    q = np.concatenate([np.asarray(q_nope), np.asarray(q_pe)], axis=-1)
    k_pages = one_layer(latent_pages, given.layer_index)
    if k_pages.dtype == np.uint8:
        k_pages = unpacked(k_pages, spec.value_dim)
    k_pages = k_pages[:, :, None]
    lengths = np.asarray(seq_lens)
    v_pages = k_pages[..., : spec.value_dim]
    keys_and_values = gather_requests(k_pages, v_pages, np.asarray(page_table), lengths)
    return _requests(q, cu_q_lens, lengths, keys_and_values, given, spec)


# For each operation, what turns the arguments of its face into requests.
REQUESTS: Mapping[str, Callable[..., Iterator[Request]]] = {
    "paged_decode": _paged_decode,
    "paged_extend": _paged_extend,
    "ragged_extend": _ragged_extend,
    "mla_decode": _mla_decode,
    "mla_extend": _mla_extend,
}


def flatten_decode(q: Any, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """A decode call's queries, offsets and options in the form of an extend call."""
    batch, q_len = q.shape[:2]
    if options.get("q_positions") is not None:
        options = options | {"q_positions": np.asarray(options["q_positions"]).reshape(-1)}
    return np.asarray(q).reshape(batch * q_len, *q.shape[2:]), np.arange(batch + 1) * q_len, options


def split_pools(k_pages: Any, v_pages: Any, *, spec: AttentionSpec, layer_index: Any) -> tuple[np.ndarray, np.ndarray]:
    """One layer's K and V pages, each [P, page_size, K, H], out of any pool."""
    pools = [one_layer(pages, layer_index) for pages in (k_pages, v_pages) if pages is not None]
    if spec.combined_pool is not None:
        (pool,) = pools
        axis = 1 if spec.combined_pool == "pages_first" else 0
        pools = [pool.take(half, axis=axis) for half in (0, 1)]
    if spec.page_layout == "HND":
        pools = [pool.swapaxes(1, 2) for pool in pools]
    k_pages, v_pages = pools
    return k_pages, v_pages


def one_layer(x: Any, layer_index: Any) -> np.ndarray:
    """An array without its leading layer axis, if it has one."""
    return np.asarray(x) if layer_index is None else np.asarray(x)[int(layer_index)]


def gather_requests(
    k_pages: np.ndarray, v_pages: np.ndarray, page_table: np.ndarray, lengths: np.ndarray
) -> KeysAndValues:
    """Keys [S, K, H] and values [S, K, Hv] of each request."""
    for pages, length in zip(page_table, lengths.tolist(), strict=True):
        yield gather_pages(k_pages, pages, length), gather_pages(v_pages, pages, length)


def gather_pages(pages: np.ndarray, page_numbers: np.ndarray, length: int) -> np.ndarray:
    """The first `length` rows of a sequence, [S, K, H]; reads only the pages that hold them."""
    page_size = pages.shape[1]
    held = pages[page_numbers[: -(-length // page_size)]]
    return held.reshape(-1, *pages.shape[2:])[:length]


def dequantised(x: np.ndarray, scale: Any, row: Any) -> np.ndarray:
    """Float64 numbers [S, heads, H] times a scale: one, one for each KV head, or row number `row` of such rows."""
    x = x.astype(np.float64)
    if scale is None:
        return x
    scale = np.asarray(scale).astype(np.float64)
    by_head = np.atleast_1d(scale[int(row)] if scale.ndim == 2 else scale)
    return x * np.repeat(by_head, x.shape[1] // len(by_head))[:, None]


def _requests(
    q: Any,
    cu_q_lens: Any,
    kv_lens: np.ndarray,
    keys_and_values: KeysAndValues,
    options: Options,
    spec: AttentionSpec,
) -> Iterator[Request]:
    q, bounds = np.asarray(q), np.asarray(cu_q_lens)
    q_lens = np.diff(bounds)
    first_key = np.zeros_like(kv_lens) if options.kv_start is None else np.asarray(options.kv_start)
    first_query = first_key + kv_lens - q_lens if options.q_start is None else np.asarray(options.q_start)
    areas = q_lens * kv_lens
    mask_offsets = np.cumsum(areas) - areas
    slopes, sinks = (
        None if x is None else np.asarray(x).astype(np.float64) for x in (options.alibi_slopes, options.sinks)
    )
    if sinks is not None and sinks.ndim == 2:
        sinks = sinks[options.layer_index]
    for r, (k, v) in enumerate(keys_and_values):
        rows = slice(bounds[r], bounds[r + 1])
        if options.q_positions is None:
            p = first_query[r] + np.arange(q_lens[r])
        else:
            p = np.asarray(options.q_positions)[rows]
        j = first_key[r] + np.arange(kv_lens[r])
        block = None
        if options.custom_mask is not None:
            mask = np.asarray(options.custom_mask)[mask_offsets[r] :]
            block = mask[: areas[r]].reshape(q_lens[r], kv_lens[r])
        yield Request(
            rows,
            dequantised(q[rows], options.q_scale, r),
            dequantised(k, options.k_scale, options.layer_index),
            dequantised(v, options.v_scale, options.layer_index),
            p,
            j,
            visible_keys(p, j, spec=spec, custom_mask=block),
            slopes,
            sinks,
        )
