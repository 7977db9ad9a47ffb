"""Checks of whole calls of attention over keys and values that are apart."""

from jattn_kernels.operands import AttentionOptions
from jattn_kernels.shapes.arrays import (
    check_are_arrays,
    check_dtypes,
    check_int32,
    check_layer_index,
    check_one_row_a_sequence,
    check_sizes,
    check_spec,
    same_dtype,
)
from jattn_kernels.shapes.options import check_mask_covers, check_options
from jattn_kernels.shapes.pages import PageGeometry, check_table, paged_geometry
from jattn_kernels.spec import AttentionSpec


def check_paged_decode(
    q, k_pages, v_pages, page_table, seq_lens, options: AttentionOptions, spec: AttentionSpec
) -> int:
    """Checks a paged decode; returns the page size.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    check_spec(spec)
    check_are_arrays(q=q, k_pages=k_pages, page_table=page_table, seq_lens=seq_lens)
    _check_queries(q, ("B", "Q", "N", "H"), spec)
    facts = _check_pages(q, k_pages, v_pages, page_table, seq_lens, options, spec)
    check_one_row_a_sequence("q", q, seq_lens)
    check_options(options, num_seqs=seq_lens.shape[0], q_shape=q.shape[:2], num_layers=facts.num_layers, spec=spec)
    check_mask_covers(options.custom_mask, num_tokens=q.shape[1], seq_lens=seq_lens)
    return facts.page_size


def check_paged_extend(
    q, k_pages, v_pages, page_table, seq_lens, cu_q_lens, options: AttentionOptions, spec: AttentionSpec
) -> int:
    """Checks a paged extend; returns the page size.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    check_spec(spec)
    check_are_arrays(q=q, k_pages=k_pages, page_table=page_table, seq_lens=seq_lens)
    _check_queries(q, ("T", "N", "H"), spec)
    facts = _check_pages(q, k_pages, v_pages, page_table, seq_lens, options, spec)
    check_int32("cu_q_lens", cu_q_lens, (seq_lens.shape[0] + 1,))
    check_options(options, num_seqs=seq_lens.shape[0], q_shape=q.shape[:1], num_layers=facts.num_layers, spec=spec)
    check_mask_covers(options.custom_mask, cu_q_lens=cu_q_lens, seq_lens=seq_lens)
    return facts.page_size


def check_ragged_extend(q, k, v, cu_q_lens, cu_kv_lens, options: AttentionOptions, spec: AttentionSpec) -> None:
    """Checks a ragged extend.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    check_spec(spec)
    check_are_arrays(q=q, k=k, v=v, cu_q_lens=cu_q_lens)
    _check_queries(q, ("T", "N", "H"), spec)
    stacked = options.layer_index is not None
    for name, array, width in (("k", k, spec.head_dim), ("v", v, spec.value_dim)):
        heads = (spec.num_kv_heads, width)
        if array.ndim != 3 + stacked or array.shape[-2:] != heads or 0 in array.shape:
            raise ValueError(
                f"`{name}` must be [S, num_kv_heads={heads[0]}, {heads[1]}] and not empty, with a leading L exactly if "
                f"`layer_index` is given. Got {name}.shape={array.shape}."
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"`k` and `v` must have one row a token. Got k.shape={k.shape}, v.shape={v.shape}.")
    if stacked:
        check_layer_index(options.layer_index, k.shape[0])
    same_dtype("k", k, "v", v)
    check_dtypes("q", q, "k", k)
    if cu_q_lens.ndim != 1 or cu_q_lens.shape[0] < 2:
        raise ValueError(f"`cu_q_lens` must be [B + 1] with B at least 1. Got cu_q_lens.shape={cu_q_lens.shape}.")
    check_int32("cu_q_lens", cu_q_lens, cu_q_lens.shape)
    check_int32("cu_kv_lens", cu_kv_lens, cu_q_lens.shape)
    check_options(
        options,
        num_seqs=cu_q_lens.shape[0] - 1,
        q_shape=q.shape[:1],
        num_layers=k.shape[0] if stacked else None,
        spec=spec,
    )
    check_mask_covers(options.custom_mask, cu_q_lens=cu_q_lens, cu_kv_lens=cu_kv_lens)


def check_schedule_sizes(seq_lens, cu_q_lens, num_tokens, page_size, max_seq_len, spec: AttentionSpec) -> None:
    """Checks what a work list is made of.

    Raises:
        ValueError: A shape, a dtype or a size is wrong.
    """
    check_spec(spec)
    check_are_arrays(seq_lens=seq_lens)
    if seq_lens.ndim != 1 or seq_lens.shape[0] < 1:
        raise ValueError(f"`seq_lens` must be [B] with B at least 1. Got seq_lens.shape={seq_lens.shape}.")
    check_int32("seq_lens", seq_lens, seq_lens.shape)
    if cu_q_lens is not None:
        check_int32("cu_q_lens", cu_q_lens, (seq_lens.shape[0] + 1,))
    check_sizes(num_tokens=num_tokens)
    for name, size in (("page_size", page_size), ("max_seq_len", max_seq_len)):
        if size is not None:
            check_sizes(**{name: size})


def _check_queries(q, axes: tuple[str, ...], spec: AttentionSpec) -> None:
    if q.ndim != len(axes) or 0 in q.shape:
        raise ValueError(f"`q` must be [{', '.join(axes)}] and not empty. Got q.shape={q.shape}.")
    if q.shape[-2:] != (spec.num_q_heads, spec.head_dim):
        raise ValueError(
            f"`q` must end in [num_q_heads={spec.num_q_heads}, head_dim={spec.head_dim}]. Got q.shape={q.shape}."
        )


def _check_pages(
    q, k_pages, v_pages, page_table, seq_lens, options: AttentionOptions, spec: AttentionSpec
) -> PageGeometry:
    k_facts, v_facts = paged_geometry(
        k_pages, v_pages, layout=spec.page_layout, combined_pool=spec.combined_pool, layer_index=options.layer_index
    )
    for name, pages, facts, width in (
        ("k_pages", k_pages, k_facts, spec.head_dim),
        ("v_pages", v_pages, v_facts, spec.value_dim),
    ):
        if (facts.num_kv_heads, facts.head_dim) != (spec.num_kv_heads, width):
            heads = (
                f"page_size, {spec.num_kv_heads}" if spec.page_layout == "NHD" else f"{spec.num_kv_heads}, page_size"
            )
            raise ValueError(
                f"`{name}` must have num_kv_heads={spec.num_kv_heads} heads of width {width} in layout "
                f"{spec.page_layout}, [..., {heads}, {width}]. Got {name}.shape={pages.shape}."
            )
    check_dtypes("q", q, "k_pages", k_pages)
    check_table(page_table, seq_lens)
    return k_facts
