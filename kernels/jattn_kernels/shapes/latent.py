"""Checks of whole calls of attention over latent pages, and of rows that are written into those."""

from jattn_kernels.operands import AttentionOptions
from jattn_kernels.packed_latents import is_packed, packed_width
from jattn_kernels.shapes.arrays import (
    FLOATS,
    check_are_arrays,
    check_dtypes,
    check_float,
    check_int32,
    check_layer_index,
    check_one_row_a_sequence,
    check_spec,
    same_dtype,
)
from jattn_kernels.shapes.options import check_mask_covers, check_options, check_scale
from jattn_kernels.shapes.pages import PageGeometry, check_table
from jattn_kernels.spec import AttentionSpec


def check_mla_decode(
    q_nope, q_pe, latent_pages, page_table, seq_lens, options: AttentionOptions, spec: AttentionSpec
) -> int:
    """Checks a decode over latent pages; returns the page size.

    Raises:
        ValueError: A shape or dtype is wrong, or the spec is not one of absorbed MLA.
    """
    facts = _check_queries_and_pages(q_nope, q_pe, ("B", "Q", "N"), latent_pages, options, spec)
    check_table(page_table, seq_lens)
    check_one_row_a_sequence("q_nope", q_nope, seq_lens)
    _check_options(options, seq_lens, q_nope.shape[:2], facts, spec)
    check_mask_covers(options.custom_mask, num_tokens=q_nope.shape[1], seq_lens=seq_lens)
    return facts.page_size


def check_mla_extend(
    q_nope, q_pe, latent_pages, page_table, seq_lens, cu_q_lens, options: AttentionOptions, spec: AttentionSpec
) -> int:
    """Checks an extend over latent pages; returns the page size.

    Raises:
        ValueError: A shape or dtype is wrong, or the spec is not one of absorbed MLA.
    """
    facts = _check_queries_and_pages(q_nope, q_pe, ("T", "N"), latent_pages, options, spec)
    check_table(page_table, seq_lens)
    check_int32("cu_q_lens", cu_q_lens, (seq_lens.shape[0] + 1,))
    _check_options(options, seq_lens, q_nope.shape[:1], facts, spec)
    check_mask_covers(options.custom_mask, cu_q_lens=cu_q_lens, seq_lens=seq_lens)
    return facts.page_size


def check_latent_rows(latent_pages, c_kv, k_pe, slots, *, layer_index, kv_scale) -> PageGeometry:
    """Checks rows that are to be written into latent pages, and their scale; returns what the pages' shape says.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    check_are_arrays(latent_pages=latent_pages, c_kv=c_kv, k_pe=k_pe)
    facts = latent_geometry(latent_pages, layer_index=layer_index)
    if c_kv.ndim != 2 or k_pe.ndim != 2 or row_width(latent_pages, c_kv.shape[1], k_pe.shape[1]) != facts.head_dim:
        sizes = "bytes of rows of C and R numbers" if is_packed(latent_pages.dtype) else "C + R"
        raise ValueError(
            f"`c_kv` and `k_pe` must be [T, C] and [T, R] with {sizes} = {facts.head_dim} as the pages are wide. "
            f"Got c_kv.shape={c_kv.shape}, k_pe.shape={k_pe.shape}."
        )
    if c_kv.shape[0] != k_pe.shape[0]:
        raise ValueError(
            f"`c_kv` and `k_pe` must have one row a slot. Got c_kv.shape={c_kv.shape}, k_pe.shape={k_pe.shape}."
        )
    same_dtype("c_kv", c_kv, "k_pe", k_pe)
    check_float("c_kv", c_kv)
    check_int32("slots", slots, c_kv.shape[:1])
    _check_scale(kv_scale, latent_pages, facts)
    return facts


def check_latent_places(latent_pages, slots, *, layer_index, kv_scale, value_dim: int | None = None) -> PageGeometry:
    """Checks which rows of latent pages are to be read, and their scale; returns what the pages' shape says.

    Raises:
        ValueError: A shape or dtype is wrong, or packed rows come without the width of their compressed part.
    """
    check_are_arrays(latent_pages=latent_pages, slots=slots)
    facts = latent_geometry(latent_pages, layer_index=layer_index)
    check_int32("slots", slots, (slots.size,))
    _check_scale(kv_scale, latent_pages, facts)
    if is_packed(latent_pages.dtype) and (value_dim is None or packed_width(value_dim, 1) > facts.head_dim):
        raise ValueError(
            "`value_dim` must be how many numbers of packed rows are compressed. "
            f"Got value_dim={value_dim}, latent_pages.shape={latent_pages.shape}."
        )
    return facts


def row_width(latent_pages, compressed: int, rotated: int) -> int:
    """How wide pages of this dtype are for rows of so many numbers."""
    return packed_width(compressed, rotated) if is_packed(latent_pages.dtype) else compressed + rotated


def latent_geometry(latent_pages, *, layer_index) -> PageGeometry:
    """Reads the shape of latent pages; their one head has no axis.

    Raises:
        ValueError: The shape has another number of axes, or too few layers, or the dtype is none that is taken.
    """
    stacked = layer_index is not None
    if latent_pages.ndim != 3 + stacked or 0 in latent_pages.shape:
        raise ValueError(
            "`latent_pages` must be [P, page_size, W] and not empty, with a leading L exactly if `layer_index` is "
            f"given. Got latent_pages.shape={latent_pages.shape}."
        )
    if not is_packed(latent_pages.dtype):
        check_float("latent_pages", latent_pages)
    *layers, num_pages, page_size, width = latent_pages.shape
    if stacked:
        check_layer_index(layer_index, layers[0])
    return PageGeometry(layers[0] if stacked else None, num_pages, page_size, 1, width)


def _check_queries_and_pages(
    q_nope, q_pe, axes: tuple[str, ...], latent_pages, options: AttentionOptions, spec: AttentionSpec
) -> PageGeometry:
    _check_spec(spec)
    check_are_arrays(q_nope=q_nope, q_pe=q_pe, latent_pages=latent_pages)
    for name, q, width in (("q_nope", q_nope, spec.value_dim), ("q_pe", q_pe, spec.head_dim - spec.value_dim)):
        if q.ndim != len(axes) + 1 or 0 in q.shape or q.shape[-2:] != (spec.num_q_heads, width):
            raise ValueError(
                f"`{name}` must be [{', '.join(axes)}, {width}] with N = num_q_heads = {spec.num_q_heads}, and not "
                f"empty. Got {name}.shape={q.shape}."
            )
    if q_nope.shape[:-1] != q_pe.shape[:-1]:
        raise ValueError(
            f"`q_nope` and `q_pe` must have the same rows. Got q_nope.shape={q_nope.shape}, q_pe.shape={q_pe.shape}."
        )
    same_dtype("q_nope", q_nope, "q_pe", q_pe)
    facts = latent_geometry(latent_pages, layer_index=options.layer_index)
    width = row_width(latent_pages, spec.value_dim, spec.head_dim - spec.value_dim)
    if facts.head_dim != width:
        rows = f"{width} bytes" if is_packed(latent_pages.dtype) else f"head_dim={spec.head_dim}"
        raise ValueError(f"`latent_pages` must have rows of {rows}. Got latent_pages.shape={latent_pages.shape}.")
    if not is_packed(latent_pages.dtype):
        check_dtypes("q_nope", q_nope, "latent_pages", latent_pages)
    elif q_nope.dtype.name not in FLOATS:
        raise ValueError(
            f"`q_nope` must be one of {', '.join(FLOATS)} over packed rows. Got q_nope.dtype={q_nope.dtype}."
        )
    _check_scale(options.k_scale, latent_pages, facts)
    return facts


def _check_scale(kv_scale, latent_pages, facts: PageGeometry) -> None:
    check_scale("kv_scale", kv_scale, 1, rows=facts.num_layers, row="layer")
    if kv_scale is not None and is_packed(latent_pages.dtype):
        raise ValueError("`kv_scale` must be None over packed rows, whose tiles have scales of their own.")


def _check_spec(spec: AttentionSpec) -> None:
    check_spec(spec)
    if spec.num_kv_heads != 1 or spec.value_dim >= spec.head_dim:
        raise ValueError(
            "`spec` of absorbed MLA must have num_kv_heads=1 and a v_head_dim smaller than its head_dim. "
            f"Got num_kv_heads={spec.num_kv_heads}, head_dim={spec.head_dim}, v_head_dim={spec.v_head_dim}."
        )
    if spec.sm_scale is None:
        raise ValueError(
            "`sm_scale` of absorbed MLA must be given: it follows from the model's own head width, not from the "
            "latent row's. Got sm_scale=None."
        )
    if spec.rope_theta is not None:
        raise ValueError(
            f"`rope_theta` must be None in MLA: latent rows hold keys that are rotated. Got {spec.rope_theta}."
        )


def _check_options(
    options: AttentionOptions, seq_lens, q_shape: tuple[int, ...], facts: PageGeometry, spec: AttentionSpec
) -> None:
    check_options(options, num_seqs=seq_lens.shape[0], q_shape=q_shape, num_layers=facts.num_layers, spec=spec)
