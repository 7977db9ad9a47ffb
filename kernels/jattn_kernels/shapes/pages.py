"""Checks of pages, page tables, and rows that are written into pages."""

from typing import NamedTuple, get_args

from jattn_kernels.shapes.arrays import check_are_arrays, check_float, check_int32, check_layer_index, same_dtype
from jattn_kernels.shapes.options import check_scale
from jattn_kernels.spec import CombinedPool, PageLayout


class PageGeometry(NamedTuple):
    """What the shape of an array of pages says; `num_layers` is None without a leading layer axis."""

    num_layers: int | None
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int


def page_geometry(name: str, pages, *, layout: str, combined_pool: str | None, layer_index) -> PageGeometry:
    """Reads the shape of `pages`, which has a leading layer axis exactly if `layer_index` is given.

    Raises:
        ValueError: The shape has another number of axes, no 2 where a combined pool has it, or too few layers, or
            `layout` or `combined_pool` is unknown.
    """
    if layout not in get_args(PageLayout):
        raise ValueError(f"`layout` must be one of {', '.join(get_args(PageLayout))}. Got layout={layout!r}.")
    if combined_pool not in (None, *get_args(CombinedPool)):
        raise ValueError(
            f"`combined_pool` must be None or one of {', '.join(get_args(CombinedPool))}. "
            f"Got combined_pool={combined_pool!r}."
        )
    check_are_arrays(**{name: pages})
    axes = ["P", "page_size", "K", "H"] if layout == "NHD" else ["P", "K", "page_size", "H"]
    if combined_pool is not None:
        axes.insert(1 if combined_pool == "pages_first" else 0, "2")
    if layer_index is not None:
        axes.insert(0, "L")
    if pages.ndim != len(axes):
        raise ValueError(
            f"`{name}` must be [{', '.join(axes)}], with a leading L exactly if `layer_index` is given. "
            f"Got {name}.shape={pages.shape}."
        )
    size = dict(zip(axes, pages.shape, strict=True))
    if size.get("2", 2) != 2:
        raise ValueError(f"`{name}` of a combined pool must be [{', '.join(axes)}]. Got {name}.shape={pages.shape}.")
    for axis in ("P", "page_size"):
        if size[axis] < 1:
            raise ValueError(f"`{name}` must have at least one page of one token. Got {name}.shape={pages.shape}.")
    if layer_index is not None:
        check_layer_index(layer_index, size["L"])
    return PageGeometry(size.get("L"), size["P"], size["page_size"], size["K"], size["H"])


def paged_geometry(
    k_pages, v_pages, *, layout: str, combined_pool: str | None, layer_index
) -> tuple[PageGeometry, PageGeometry]:
    """The geometries of K and V, which differ at most in `head_dim`.

    Raises:
        ValueError: A shape is wrong, the two do not belong together, or `v_pages` is given to a combined pool.
    """
    if combined_pool is not None:
        if v_pages is not None:
            raise ValueError("`v_pages` must be None: a combined pool is passed whole as `k_pages`.")
        both = page_geometry("k_pages", k_pages, layout=layout, combined_pool=combined_pool, layer_index=layer_index)
        return both, both
    if v_pages is None:
        raise ValueError("`v_pages` may be None only with a combined pool. Got combined_pool=None.")
    check_are_arrays(v_pages=v_pages)
    k_pages_facts = page_geometry("k_pages", k_pages, layout=layout, combined_pool=None, layer_index=layer_index)
    v_pages_facts = page_geometry("v_pages", v_pages, layout=layout, combined_pool=None, layer_index=layer_index)
    if k_pages_facts[:-1] != v_pages_facts[:-1]:
        raise ValueError(
            "`k_pages` and `v_pages` must agree in all axes but the last. "
            f"Got k_pages.shape={k_pages.shape}, v_pages.shape={v_pages.shape}."
        )
    same_dtype("k_pages", k_pages, "v_pages", v_pages)
    return k_pages_facts, v_pages_facts


def check_table(page_table, seq_lens) -> None:
    """Checks a page table and the lengths that go with it.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    check_are_arrays(seq_lens=seq_lens, page_table=page_table)
    if seq_lens.ndim != 1 or page_table.ndim != 2 or seq_lens.shape[0] < 1 or page_table.shape[1] < 1:
        raise ValueError(
            "`seq_lens` must be [B] and `page_table` [B, max_pages], both sizes at least 1. "
            f"Got seq_lens.shape={seq_lens.shape}, page_table.shape={page_table.shape}."
        )
    check_int32("seq_lens", seq_lens, seq_lens.shape)
    check_int32("page_table", page_table, (seq_lens.shape[0], page_table.shape[1]))


def check_page_rows(
    k_pages,
    v_pages,
    k,
    v,
    slots,
    *,
    layout: str,
    combined_pool: str | None,
    layer_index,
    k_scale=None,
    v_scale=None,
) -> PageGeometry:
    """Checks rows that are to be written into pages, and their scales; returns the geometry of K's pages.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    check_are_arrays(k=k, v=v)
    facts = paged_geometry(k_pages, v_pages, layout=layout, combined_pool=combined_pool, layer_index=layer_index)
    for name, rows, geometry in zip(("k", "v"), (k, v), facts, strict=True):
        if rows.ndim != 3 or rows.shape[1:] != (geometry.num_kv_heads, geometry.head_dim):
            raise ValueError(
                f"`{name}` must be [T, {geometry.num_kv_heads}, {geometry.head_dim}] as the pages are. "
                f"Got {name}.shape={rows.shape}."
            )
        check_float(name, rows)
    check_float("k_pages", k_pages)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(name, scale, facts[0].num_kv_heads, rows=facts[0].num_layers, row="layer")
    check_int32("slots", slots, k.shape[:1])
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"`k` and `v` must have one row a slot. Got k.shape={k.shape}, v.shape={v.shape}.")
    return facts[0]
