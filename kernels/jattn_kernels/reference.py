"""The oracle: what every attention feature means, in NumPy and float64, one request at a time."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jattn_kernels.spec import AttentionSpec

Result = np.ndarray | tuple[np.ndarray, np.ndarray]


class Request(NamedTuple):
    """One request, cut out of the batch.

    Attributes:
        rows: Where its queries sit among all query rows.
        q: Its queries, float64 [Q, N, H].
        k: Its keys, float64 [S, K, H]; none past its length.
        v: Its values, float64 [S, K, Hv].
        visible: Which key each query sees, bool [Q, S].
    """

    rows: slice
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    visible: np.ndarray


def paged_decode(
    q: Float[Any, "B Q N H"],
    k_pages: Float[Any, "..."],
    v_pages: Float[Any, "..."] | None,
    page_table: Int[Any, "B max_pages"],
    seq_lens: Int[Any, " B"],
    *,
    spec: AttentionSpec,
    layer_index: Any = None,
    q_start: Int[Any, " B"] | None = None,
    kv_start: Int[Any, " B"] | None = None,
    q_positions: Int[Any, "B Q"] | None = None,
    custom_mask: Bool[Any, " M"] | None = None,
    return_lse: bool = False,
) -> Result:
    """Attention of Q queries a request over its pages: float64 out [B, Q, N, Hv] and lse [B, Q, N]."""
    flat_q, cu_q_lens, positions = flatten_decode(q, q_positions)
    requests = paged_requests(
        flat_q,
        k_pages,
        v_pages,
        page_table,
        seq_lens,
        cu_q_lens,
        spec=spec,
        layer_index=layer_index,
        q_start=q_start,
        kv_start=kv_start,
        q_positions=positions,
        custom_mask=custom_mask,
    )
    out, lse = _attend(len(flat_q), requests, spec)
    leading = q.shape[:2]
    out, lse = out.reshape(*leading, *out.shape[1:]), lse.reshape(*leading, -1)
    return (out, lse) if return_lse else out


def paged_extend(
    q: Float[Any, "T N H"],
    k_pages: Float[Any, "..."],
    v_pages: Float[Any, "..."] | None,
    page_table: Int[Any, "B max_pages"],
    seq_lens: Int[Any, " B"],
    cu_q_lens: Int[Any, " B_plus_1"],
    *,
    spec: AttentionSpec,
    layer_index: Any = None,
    q_start: Int[Any, " B"] | None = None,
    kv_start: Int[Any, " B"] | None = None,
    q_positions: Int[Any, " T"] | None = None,
    custom_mask: Bool[Any, " M"] | None = None,
    return_lse: bool = False,
) -> Result:
    """Attention of ragged queries over pages: float64 out [T, N, Hv] and lse [T, N]."""
    requests = paged_requests(
        q,
        k_pages,
        v_pages,
        page_table,
        seq_lens,
        cu_q_lens,
        spec=spec,
        layer_index=layer_index,
        q_start=q_start,
        kv_start=kv_start,
        q_positions=q_positions,
        custom_mask=custom_mask,
    )
    out, lse = _attend(len(q), requests, spec)
    return (out, lse) if return_lse else out


def ragged_extend(
    q: Float[Any, "T N H"],
    k: Float[Any, "S K H"],
    v: Float[Any, "S K Hv"],
    cu_q_lens: Int[Any, " B_plus_1"],
    cu_kv_lens: Int[Any, " B_plus_1"],
    *,
    spec: AttentionSpec,
    q_start: Int[Any, " B"] | None = None,
    kv_start: Int[Any, " B"] | None = None,
    q_positions: Int[Any, " T"] | None = None,
    custom_mask: Bool[Any, " M"] | None = None,
    return_lse: bool = False,
) -> Result:
    """Attention of ragged queries over ragged keys: float64 out [T, N, Hv] and lse [T, N]."""
    requests = ragged_requests(
        q,
        k,
        v,
        cu_q_lens,
        cu_kv_lens,
        spec=spec,
        q_start=q_start,
        kv_start=kv_start,
        q_positions=q_positions,
        custom_mask=custom_mask,
    )
    out, lse = _attend(len(q), requests, spec)
    return (out, lse) if return_lse else out


def merge_states(
    outs: Float[Any, "parts *rows N H"], lses: Float[Any, "parts *rows N"]
) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse over all keys from those of disjoint parts; an empty part (lse -inf) counts for nothing."""
    outs, lses = _float64(outs), _float64(lses)
    top = lses.max(axis=0)
    shift = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(lses - shift)
    total = weights.sum(axis=0)
    outs = np.where(np.isneginf(lses)[..., None], 0.0, outs)
    out = (outs * weights[..., None]).sum(axis=0)
    return _normalise(out, total, shift)


def merge_state(
    out_a: Float[Any, "*rows N H"],
    lse_a: Float[Any, "*rows N"],
    out_b: Float[Any, "*rows N H"],
    lse_b: Float[Any, "*rows N"],
) -> tuple[np.ndarray, np.ndarray]:
    """`merge_states` of two parts."""
    return merge_states(np.stack([_float64(out_a), _float64(out_b)]), np.stack([_float64(lse_a), _float64(lse_b)]))


def attend_one(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, *, spec: AttentionSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one request: out [Q, N, Hv] and lse [Q, N]; 0 and -inf where a row sees no key."""
    k, v = (np.repeat(x, spec.group_size, axis=1) for x in (k, v))
    logits = soft_cap(spec.scale * np.einsum("qnh,snh->qns", q, k), spec.logits_soft_cap)
    logits = np.where(visible[:, None, :], logits, -np.inf)
    top = logits.max(axis=-1, initial=-np.inf)
    shift = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(logits - shift[..., None])
    return _normalise(np.einsum("qns,snh->qnh", weights, v), weights.sum(axis=-1), shift)


def soft_cap(logits: np.ndarray, cap: float | None) -> np.ndarray:
    """cap * tanh(logits / cap)."""
    return logits if cap is None else cap * np.tanh(logits / cap)


def visible_keys(
    p: np.ndarray, j: np.ndarray, *, spec: AttentionSpec, custom_mask: np.ndarray | None = None
) -> np.ndarray:
    """Which of the keys at positions `j` [S] the queries at `p` [Q] see: all active rules together, bool [Q, S]."""
    p, j = p[:, None], j[None, :]
    rules = [np.broadcast_to(True, np.broadcast_shapes(p.shape, j.shape))]
    if custom_mask is not None:
        rules.append(custom_mask)
    elif spec.causal:
        rules.append(causal(p, j))
    if spec.window_left is not None:
        rules.append(within_left(p, j, spec.window_left))
    if spec.window_right is not None:
        rules.append(within_right(p, j, spec.window_right))
    if spec.chunk_size is not None:
        rules.append(same_chunk(p, j, spec.chunk_size))
    return np.logical_and.reduce(rules)


def causal(p: np.ndarray, j: np.ndarray) -> np.ndarray:
    """The key is not after the query."""
    return j <= p


def within_left(p: np.ndarray, j: np.ndarray, left: int) -> np.ndarray:
    """The key is at most `left` before the query."""
    return j >= p - left


def within_right(p: np.ndarray, j: np.ndarray, right: int) -> np.ndarray:
    """The key is at most `right` after the query."""
    return j <= p + right


def same_chunk(p: np.ndarray, j: np.ndarray, size: int) -> np.ndarray:
    """Key and query are in the same chunk; chunks begin at multiples of `size`, also below 0."""
    return j // size == p // size


def flatten_decode(q: Any, q_positions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """A decode call's queries, offsets and positions in the form of an extend call."""
    batch, q_len = q.shape[:2]
    positions = None if q_positions is None else np.asarray(q_positions).reshape(-1)
    return np.asarray(q).reshape(batch * q_len, *q.shape[2:]), np.arange(batch + 1) * q_len, positions


def paged_requests(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    seq_lens: Any,
    cu_q_lens: Any,
    *,
    spec: AttentionSpec,
    layer_index: Any = None,
    **positions_and_mask: Any,
) -> Iterator[Request]:
    """The requests of a `paged_extend` call."""
    k_pages, v_pages = split_pools(k_pages, v_pages, spec=spec, layer_index=layer_index)
    lengths = np.asarray(seq_lens)
    keys_and_values = (
        (gather_pages(k_pages, pages, length), gather_pages(v_pages, pages, length))
        for pages, length in zip(np.asarray(page_table), lengths.tolist(), strict=True)
    )
    return _requests(q, cu_q_lens, lengths, keys_and_values, spec=spec, **positions_and_mask)


def ragged_requests(
    q: Any, k: Any, v: Any, cu_q_lens: Any, cu_kv_lens: Any, *, spec: AttentionSpec, **positions_and_mask: Any
) -> Iterator[Request]:
    """The requests of a `ragged_extend` call."""
    k, v, bounds = np.asarray(k), np.asarray(v), np.asarray(cu_kv_lens)
    keys_and_values = ((k[a:b], v[a:b]) for a, b in itertools.pairwise(bounds))
    return _requests(q, cu_q_lens, np.diff(bounds), keys_and_values, spec=spec, **positions_and_mask)


def split_pools(
    k_pages: Any, v_pages: Any, *, spec: AttentionSpec, layer_index: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """One layer's K and V pages, each [P, page_size, K, H], out of any pool."""
    pools = [np.asarray(pages) for pages in (k_pages, v_pages) if pages is not None]
    if layer_index is not None:
        pools = [pool[int(layer_index)] for pool in pools]
    if spec.combined_pool is not None:
        (pool,) = pools
        axis = 1 if spec.combined_pool == "pages_first" else 0
        pools = [pool.take(half, axis=axis) for half in (0, 1)]
    if spec.page_layout == "HND":
        pools = [pool.swapaxes(1, 2) for pool in pools]
    k_pages, v_pages = pools
    return k_pages, v_pages


def gather_pages(pages: np.ndarray, page_numbers: np.ndarray, length: int) -> np.ndarray:
    """The first `length` rows of a sequence, [S, K, H]; reads only the pages that hold them."""
    page_size = pages.shape[1]
    held = pages[page_numbers[: -(-length // page_size)]]
    return held.reshape(-1, *pages.shape[2:])[:length]


def _requests(
    q: Any,
    cu_q_lens: Any,
    kv_lens: np.ndarray,
    keys_and_values: Iterator[tuple[np.ndarray, np.ndarray]],
    *,
    spec: AttentionSpec,
    q_start: Any = None,
    kv_start: Any = None,
    q_positions: Any = None,
    custom_mask: Any = None,
) -> Iterator[Request]:
    q, bounds = np.asarray(q), np.asarray(cu_q_lens)
    q_lens = np.diff(bounds)
    first_key = np.zeros_like(kv_lens) if kv_start is None else np.asarray(kv_start)
    first_query = first_key + kv_lens - q_lens if q_start is None else np.asarray(q_start)
    areas = q_lens * kv_lens
    mask_offsets = np.cumsum(areas) - areas
    for r, (k, v) in enumerate(keys_and_values):
        rows = slice(bounds[r], bounds[r + 1])
        p = first_query[r] + np.arange(q_lens[r]) if q_positions is None else np.asarray(q_positions)[rows]
        j = first_key[r] + np.arange(kv_lens[r])
        block = None
        if custom_mask is not None:
            block = np.asarray(custom_mask)[mask_offsets[r] :][: areas[r]].reshape(q_lens[r], kv_lens[r])
        visible = visible_keys(p, j, spec=spec, custom_mask=block)
        yield Request(rows, _float64(q[rows]), _float64(k), _float64(v), visible)


def _attend(num_rows: int, requests: Iterator[Request], spec: AttentionSpec) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros((num_rows, spec.num_q_heads, spec.value_dim))
    lse = np.full((num_rows, spec.num_q_heads), -np.inf)
    for request in requests:
        out[request.rows], lse[request.rows] = attend_one(request.q, request.k, request.v, request.visible, spec=spec)
    return out, lse


def _normalise(out: np.ndarray, total: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    empty = total == 0
    total = np.where(empty, 1.0, total)
    return out / total[..., None], np.where(empty, -np.inf, shift + np.log(total))


def _float64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)
