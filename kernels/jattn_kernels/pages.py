"""Writing rows into pages, reading latent ones, and copying whole pages."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jattn_kernels.lowering.scales import head_scales
from jattn_kernels.packed_latents import is_packed, pack_latents, unpack_latents
from jattn_kernels.shapes.arrays import check_are_arrays, check_int32
from jattn_kernels.shapes.latent import check_latent_places, check_latent_rows
from jattn_kernels.shapes.pages import PageGeometry, check_page_rows
from jattn_kernels.spec import CombinedPool, PageLayout, is_whole


def write_pages(
    k_pages: Float[Array, "..."],
    v_pages: Float[Array, "..."] | None,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K Hv"],
    slots: Int[Array, " T"],
    *,
    layout: PageLayout = "NHD",
    combined_pool: CombinedPool | None = None,
    layer_index: Int[Array, ""] | int | None = None,
    k_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
    """The pages with row t of `k` and `v` at slot page * page_size + offset; in place where the pages are donated.

    Args:
        slots: Distinct where in range. A slot that is negative, or num_pages * page_size or more, is written nowhere.
        layer_index: Which layer of pages with a leading layer axis; may be traced.
        k_scale, v_scale: What is stored is row / scale: a scalar, one for each of K heads, or a row of those for each
            layer of pages that have layers; None is 1.

    Returns:
        Both arrays of pages; rows are rounded to their dtype, and clipped to its finite range if that is fp8.

    Raises:
        ValueError: A shape or dtype is wrong, or `layout` or `combined_pool` is unknown.
    """
    facts = check_page_rows(
        k_pages,
        v_pages,
        k,
        v,
        slots,
        layout=layout,
        combined_pool=combined_pool,
        layer_index=layer_index,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    k_pages, k, v, slots = (jnp.asarray(array) for array in (k_pages, k, v, slots))
    v_pages = None if v_pages is None else jnp.asarray(v_pages)

    def written(pages, rows, scale, kv_index):
        index = _row_index(facts, slots, layout, combined_pool, layer_index, kv_index)
        if scale is not None:
            scale = head_scales(scale, facts.num_kv_heads, layer_index)
        return pages.at[index].set(_stored(rows, scale, pages.dtype), mode="drop")

    new_k = written(k_pages, k, k_scale, 0)
    if v_pages is None:
        return written(new_k, v, v_scale, 1), None
    return new_k, written(v_pages, v, v_scale, 1)


def write_latent_pages(
    latent_pages: Shaped[Array, "*L P page_size W"],
    c_kv: Float[Array, "T C"],
    k_pe: Float[Array, "T R"],
    slots: Int[Array, " T"],
    *,
    layer_index: Int[Array, ""] | int | None = None,
    kv_scale: Float[Array, "..."] | None = None,
) -> Shaped[Array, "*L P page_size W"]:
    """Latent pages with row [c_kv, k_pe] of token t at its slot; in place where the pages are donated.

    Args:
        latent_pages: Of numbers, or of packed rows (`packed_latents.py`), which are bytes.
        c_kv: Compressed keys and values.
        k_pe: Rotated keys.
        slots, layer_index: As in `write_pages`.
        kv_scale: What is stored is row / scale: a scalar, [1], or [L, 1] with `layer_index`; None is 1. Of packed rows
            each tile has one of its own.

    Returns:
        The pages, rounded as in `write_pages`.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    facts = check_latent_rows(latent_pages, c_kv, k_pe, slots, layer_index=layer_index, kv_scale=kv_scale)
    latent_pages, c_kv, k_pe, slots = (jnp.asarray(array) for array in (latent_pages, c_kv, k_pe, slots))
    index = _row_index(facts, slots, "NHD", None, layer_index, 0)
    if is_packed(latent_pages.dtype):
        return latent_pages.at[index].set(pack_latents(c_kv, k_pe), mode="drop")
    scale = None if kv_scale is None else head_scales(kv_scale, 1, layer_index)
    rows = _stored(jnp.concatenate([c_kv, k_pe], axis=-1)[:, None], scale, latent_pages.dtype)[:, 0]
    return latent_pages.at[index].set(rows, mode="drop")


def read_latent_pages(
    latent_pages: Shaped[Array, "*L P page_size W"],
    slots: Int[Array, " T"],
    *,
    layer_index: Int[Array, ""] | int | None = None,
    kv_scale: Float[Array, "..."] | None = None,
    value_dim: int | None = None,
) -> Float[Array, "T _"]:
    """The rows at some slots, as `write_latent_pages` put them there; 0 where a slot is out of range.

    Args:
        layer_index, kv_scale: As in `write_latent_pages`.
        value_dim: How many numbers of a row are compressed; asked for where rows are packed.

    Returns:
        Rows in the pages' dtype; with a scale times that, or what packed rows stand for, in float32.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    facts = check_latent_places(latent_pages, slots, layer_index=layer_index, kv_scale=kv_scale, value_dim=value_dim)
    latent_pages, slots = jnp.asarray(latent_pages), jnp.asarray(slots)
    index = _row_index(facts, slots, "NHD", None, layer_index, 0)
    rows = latent_pages.at[index].get(mode="fill", fill_value=0)
    if is_packed(rows.dtype):
        assert value_dim is not None
        return unpack_latents(rows, value_dim)
    return rows if kv_scale is None else rows.astype(jnp.float32) * head_scales(kv_scale, 1, layer_index)[None]


def _row_index(
    facts: PageGeometry,
    slots: Int[Array, " T"],
    layout: PageLayout,
    combined_pool: CombinedPool | None,
    layer_index: Int[Array, ""] | int | None,
    kv_index: int,
) -> tuple:
    in_range = (slots >= 0) & (slots < facts.num_pages * facts.page_size)
    page = jnp.where(in_range, slots // facts.page_size, facts.num_pages)
    offset = slots % facts.page_size
    # Every indexed axis precedes the rows' own: a scatter with a window axis between them transposes the pool.
    if layout == "HND":
        heads = jnp.arange(facts.num_kv_heads, dtype=jnp.int32)[None]
        page, offset = page[:, None], offset[:, None]
        inner = (heads, offset)
    else:
        inner = (offset,)
    layer = () if layer_index is None else (layer_index,)
    match combined_pool:
        case None:
            return (*layer, page, *inner)
        case "pages_first":
            return (*layer, page, kv_index, *inner)
        case "kv_first":
            return (*layer, kv_index, page, *inner)


def _stored(rows: Float[Array, "T K H"], scale: Float[Array, " K"] | None, dtype) -> Float[Array, "T K H"]:
    if scale is not None:
        rows = rows.astype(jnp.float32) / scale[None, :, None]
    if jnp.finfo(dtype).bits == 8:
        limit = float(jnp.finfo(dtype).max)
        rows = jnp.clip(rows.astype(jnp.float32), -limit, limit)
    return rows.astype(dtype)


def copy_pages(
    pages: Float[Array, "..."], src: Int[Array, " n"], dst: Int[Array, " n"], *, axis: int = 0
) -> Float[Array, "..."]:
    """The pages with page src[i] copied to page dst[i]; in place where `pages` is donated.

    All copies read what was there before. A `dst` that is negative or out of range is copied nowhere.

    Args:
        axis: The axis of pages: 0, or one more for each axis before it, of layers and of K and V.

    Raises:
        ValueError: `src` and `dst` are not int32 of one length, or `pages` has no such axis.
    """
    check_are_arrays(pages=pages, src=src)
    check_int32("src", src, (src.size,))
    check_int32("dst", dst, src.shape)
    if not is_whole(axis) or not 0 <= axis < pages.ndim:
        raise ValueError(
            f"`axis` must be one of `pages`, counted from 0. Got axis={axis!r}, pages.shape={pages.shape}."
        )
    pages = jnp.asarray(pages)
    before = (slice(None),) * axis
    dst = jnp.where(dst < 0, pages.shape[axis], dst)
    return pages.at[(*before, dst)].set(pages.at[(*before, src)].get(mode="clip"), mode="drop")
