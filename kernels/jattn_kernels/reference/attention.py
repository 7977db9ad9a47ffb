"""The faces of the oracle: those of the kernels, and with their optional arguments."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from jattn_kernels.reference.requests import REQUESTS, Request
from jattn_kernels.reference.scores import attend_one
from jattn_kernels.spec import AttentionSpec

Result = np.ndarray | tuple[np.ndarray, np.ndarray]


def paged_decode(
    q: Float[Any, "B Q N H"],
    k_pages: Float[Any, "..."],
    v_pages: Float[Any, "..."] | None,
    page_table: Int[Any, "B max_pages"],
    seq_lens: Int[Any, " B"],
    *,
    spec: AttentionSpec,
    return_lse: bool = False,
    **options: Any,
) -> Result:
    """Attention of Q queries a request over its pages: float64 out [B, Q, N, Hv] and lse [B, Q, N].

    A request's own K and V rows, those of keys s < kv_len, must be finite, here and in the functions below. One that is
    not may reach any row of the same request's output, also where the mask hides it, as its weight 0 times NaN or
    infinity is NaN. It never reaches another request. Rows that no request owns may hold anything.
    """
    requests = REQUESTS["paged_decode"](q, k_pages, v_pages, page_table, seq_lens, spec=spec, **options)
    return _attend(q.shape[:-1], requests, spec, return_lse)


def paged_extend(
    q: Float[Any, "T N H"],
    k_pages: Float[Any, "..."],
    v_pages: Float[Any, "..."] | None,
    page_table: Int[Any, "B max_pages"],
    seq_lens: Int[Any, " B"],
    cu_q_lens: Int[Any, " B_plus_1"],
    *,
    spec: AttentionSpec,
    return_lse: bool = False,
    **options: Any,
) -> Result:
    """Attention of ragged queries over pages: float64 out [T, N, Hv] and lse [T, N]."""
    requests = REQUESTS["paged_extend"](q, k_pages, v_pages, page_table, seq_lens, cu_q_lens, spec=spec, **options)
    return _attend(q.shape[:-1], requests, spec, return_lse)


def ragged_extend(
    q: Float[Any, "T N H"],
    k: Float[Any, "*L S K H"],
    v: Float[Any, "*L S K Hv"],
    cu_q_lens: Int[Any, " B_plus_1"],
    cu_kv_lens: Int[Any, " B_plus_1"],
    *,
    spec: AttentionSpec,
    return_lse: bool = False,
    **options: Any,
) -> Result:
    """Attention of ragged queries over ragged keys: float64 out [T, N, Hv] and lse [T, N]."""
    requests = REQUESTS["ragged_extend"](q, k, v, cu_q_lens, cu_kv_lens, spec=spec, **options)
    return _attend(q.shape[:-1], requests, spec, return_lse)


def mla_decode(
    q_nope: Float[Any, "B Q N C"],
    q_pe: Float[Any, "B Q N R"],
    latent_pages: Shaped[Any, "*L P page_size W"],
    page_table: Int[Any, "B max_pages"],
    seq_lens: Int[Any, " B"],
    *,
    spec: AttentionSpec,
    return_lse: bool = False,
    **options: Any,
) -> Result:
    """Absorbed MLA of Q queries a request over its latent pages: float64 out [B, Q, N, C] and lse [B, Q, N]."""
    requests = REQUESTS["mla_decode"](q_nope, q_pe, latent_pages, page_table, seq_lens, spec=spec, **options)
    return _attend(q_nope.shape[:-1], requests, spec, return_lse)


def mla_extend(
    q_nope: Float[Any, "T N C"],
    q_pe: Float[Any, "T N R"],
    latent_pages: Shaped[Any, "*L P page_size W"],
    page_table: Int[Any, "B max_pages"],
    seq_lens: Int[Any, " B"],
    cu_q_lens: Int[Any, " B_plus_1"],
    *,
    spec: AttentionSpec,
    return_lse: bool = False,
    **options: Any,
) -> Result:
    """Absorbed MLA of ragged queries over latent pages: float64 out [T, N, C] and lse [T, N]."""
    requests = REQUESTS["mla_extend"](q_nope, q_pe, latent_pages, page_table, seq_lens, cu_q_lens, spec=spec, **options)
    return _attend(q_nope.shape[:-1], requests, spec, return_lse)


def _attend(leading: tuple[int, ...], requests: Iterator[Request], spec: AttentionSpec, return_lse: bool) -> Result:
    lse = np.full(leading, -np.inf).reshape(-1, spec.num_q_heads)
    out = np.zeros((*lse.shape, spec.value_dim))
    for request in requests:
        out[request.rows], lse[request.rows] = attend_one(request, spec)
    out, lse = out.reshape(*leading, -1), lse.reshape(leading)
    return (out, lse) if return_lse else out
