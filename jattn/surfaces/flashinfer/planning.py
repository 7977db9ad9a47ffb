"""What the wrappers' `plan` methods share: the bounds of their buffers, and plans made of page lists."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jattn.attention.metadata import QueriesOverPages
from jattn.surfaces.flashinfer.page_lists import Bounds, PageLists, padded, page_rows, room
from jattn.surfaces.flashinfer.plan import PagedPlan, RaggedPlan, paged_plan


def paged_bounds(**buffers: Any) -> Bounds:
    """What the three buffers of page lists hold, given by name: offsets, pages, lengths of last pages.

    Raises:
        ValueError: One is missing or not of one axis, or they do not belong together.
    """
    sizes = {name: buffer_size(name, buffer) for name, buffer in buffers.items()}
    (indptr, rows), (_, num_pages), (last, batch_size) = sizes.items()
    if rows != batch_size + 1 or batch_size < 1 or num_pages < 1:
        raise ValueError(
            f"`{indptr}` must be [batch_size + 1] and `{last}` [batch_size], no buffer empty. "
            f"Got {', '.join(f'{name} of {size}' for name, size in sizes.items())}."
        )
    return Bounds(batch_size, num_pages)


def buffer_size(name: str, buffer: Any) -> int:
    """The length of a buffer of one axis.

    Raises:
        ValueError: It is missing, or of another number of axes.
    """
    if buffer is None:
        raise ValueError(f"`{name}` must be given with use_cuda_graph=True: its shape bounds every plan. Got None.")
    shape = getattr(buffer, "shape", None)
    if shape is None or len(shape) != 1:
        got = type(buffer).__name__ if shape is None else f"{name}.shape={shape}"
        raise ValueError(f"`{name}` must be an array of one axis, or a `jax.ShapeDtypeStruct`. Got {got}.")
    return shape[0]


def plan_of_lists(lists: PageLists, cu_q_lens: Any, bounds: Bounds | None, **facts: Any) -> PagedPlan:
    """The plan of page lists on the host, in arrays that have room for `bounds`, or for about as much as there is."""
    num_pages = room(len(lists.indices)) if bounds is None else bounds.num_pages
    most = max(1, int((lists.indptr[1:] - lists.indptr[:-1]).max()))
    return _planned(
        jnp.asarray(lists.indptr),
        jnp.asarray(padded(lists.indices, num_pages, 0)),
        jnp.asarray(lists.seq_lens),
        cu_q_lens,
        facts.pop("custom_mask", None),
        facts.pop("alibi_slopes"),
        max_pages=room(most) if bounds is None else num_pages,
        **facts,
    )


@functools.partial(
    jax.jit,
    static_argnames=("max_pages", "spec", "page_size", "num_tokens", "q_dtype", "kv_dtype", "implementation"),
)
def _planned(indptr, indices, seq_lens, cu_q_lens, custom_mask, alibi_slopes, *, max_pages: int, **facts) -> PagedPlan:
    table = page_rows(indptr, indices, max_pages=max_pages)
    q_len = 1 if cu_q_lens is None else None
    read = QueriesOverPages(
        page_table=table, seq_lens=seq_lens, cu_q_lens=cu_q_lens, q_len=q_len, custom_mask=custom_mask
    )
    return paged_plan(read, alibi_slopes, **facts)


def current_plan[Plan](given: Any, kept: Any, q: Any, kind: type[Plan]) -> Plan:
    """The plan that `run` is to use.

    Raises:
        ValueError: There is none of this kind, or the kept one would become a constant of what is being compiled.
    """
    if given is not None:
        if not isinstance(given, kind):
            raise ValueError(f"`planned` must be what this wrapper's `plan` returned. Got {type(given).__name__}.")
        return given
    if kept is None:
        raise ValueError("`plan` must be called before `run`, or its result given as `planned`.")
    if isinstance(q, Tracer):
        raise ValueError("`planned` must be given inside jit: the kept plan would become a constant of the step.")
    return kept


def check_same_kind(first: Any, new: Any) -> None:
    """Checks that what was compiled for a wrapper's first plan serves a new one, too.

    Raises:
        ValueError: It does not.
    """
    if first is not None and jax.tree.structure(first) != jax.tree.structure(new):
        before, now = _facts(first), _facts(new)
        others = ", ".join(f"{name}={now[name]} after {before[name]}" for name in now if now[name] != before[name])
        raise ValueError(
            "With CUDA graphs every plan must have the static facts of the first: heads, sizes, dtypes, window, cap, "
            f"scale, position encoding, and a mask or none. Got {others}."
        )


def _facts(plan: PagedPlan | RaggedPlan) -> dict[str, Any]:
    """What tells the plans of one wrapper apart, in FlashInfer's words."""
    spec = dataclasses.asdict(plan.spec)
    return {
        "num_qo_heads": spec.pop("num_q_heads"),
        "head_dim_vo": spec.pop("v_head_dim"),
        **spec,
        "page_size": getattr(plan, "page_size", None),
        "q_data_type": plan.q_dtype,
        "kv_data_type": plan.kv_dtype,
        "custom_mask": None if plan.custom_mask is None else "a mask",
        "alibi_slopes": None if plan.alibi_slopes is None else "slopes",
    }
