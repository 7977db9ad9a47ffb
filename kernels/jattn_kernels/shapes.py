"""Trace-time checks: the one place where a wrong shape or dtype becomes a sentence."""

from typing import NamedTuple, get_args

import jax.numpy as jnp
from jax.core import Tracer

from jattn_kernels.call import AttentionOptions
from jattn_kernels.spec import AttentionSpec, CombinedPool, PageLayout, is_whole

_FLOATS = ("float32", "bfloat16", "float16")
_FP8 = ("float8_e4m3fn", "float8_e5m2")


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


def check_are_arrays(**values) -> None:
    """Checks that all are arrays, of JAX, of NumPy or traced.

    Raises:
        ValueError: One has no shape or dtype.
    """
    for name, value in values.items():
        if not all(hasattr(value, fact) for fact in ("ndim", "shape", "dtype")):
            raise ValueError(f"`{name}` must be an array of JAX or NumPy. Got {brief(value)}.")


def brief(value) -> str:
    """What a value is, for a sentence: its type, or None."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_spec(spec) -> None:
    """Checks that it is one.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(spec, AttentionSpec):
        raise ValueError(f"`spec` must be an AttentionSpec. Got {brief(spec)}.")


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


def check_sizes(**sizes) -> None:
    """Checks that all are counts of something.

    Raises:
        ValueError: One is no whole number, or below 1.
    """
    for name, size in sizes.items():
        if not is_whole(size) or size < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1. Got {name}={size!r}.")


def check_axes(name: str, array, axes: tuple[str, ...]) -> None:
    """Checks how many axes an array has.

    Raises:
        ValueError: Another number.
    """
    if array.ndim != len(axes):
        raise ValueError(f"`{name}` must be [{', '.join(axes)}]. Got {name}.shape={array.shape}.")


def check_merge(outs, lses) -> None:
    """Checks the parts of a merge.

    Raises:
        ValueError: `outs` and `lses` do not belong together, or there is no part.
    """
    check_are_arrays(outs=outs, lses=lses)
    if outs.ndim < 2 or outs.shape[:-1] != lses.shape or outs.shape[0] < 1:
        raise ValueError(
            "`lses` must have the shape of `outs` without its last axis, and at least one part. "
            f"Got outs.shape={outs.shape}, lses.shape={lses.shape}."
        )
    for name, array in (("outs", outs), ("lses", lses)):
        check_float(name, array)


def check_merge_of_two(out_a, lse_a, out_b, lse_b) -> None:
    """Checks that two parts can be stacked for a merge.

    Raises:
        ValueError: They are no arrays, or of different shapes or dtypes.
    """
    check_are_arrays(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    for name, a, b in (("out", out_a, out_b), ("lse", lse_a, lse_b)):
        if a.shape != b.shape:
            raise ValueError(
                f"`{name}_a` and `{name}_b` must be of one shape. "
                f"Got {name}_a.shape={a.shape}, {name}_b.shape={b.shape}."
            )
        same_dtype(f"{name}_a", a, f"{name}_b", b)


def check_int32(name: str, array, shape: tuple[int, ...]) -> None:
    """Checks that `array` is an array, of int32 and of this shape.

    Raises:
        ValueError: It is not.
    """
    check_are_arrays(**{name: array})
    if array.dtype != jnp.int32 or array.shape != shape:
        raise ValueError(
            f"`{name}` must be int32 {list(shape)}. Got {name}.dtype={array.dtype}, {name}.shape={array.shape}."
        )


def same_dtype(name_a: str, a, name_b: str, b) -> None:
    """Checks that two arrays have one dtype.

    Raises:
        ValueError: They do not.
    """
    if a.dtype != b.dtype:
        raise ValueError(
            f"`{name_a}` and `{name_b}` must have one dtype. Got {name_a}.dtype={a.dtype}, {name_b}.dtype={b.dtype}."
        )


def _check_queries(q, axes: tuple[str, ...], spec: AttentionSpec) -> None:
    if q.ndim != len(axes) or 0 in q.shape:
        raise ValueError(f"`q` must be [{', '.join(axes)}] and not empty. Got q.shape={q.shape}.")
    if q.shape[-2:] != (spec.num_q_heads, spec.head_dim):
        raise ValueError(
            f"`q` must end in [num_q_heads={spec.num_q_heads}, head_dim={spec.head_dim}]. Got q.shape={q.shape}."
        )


def check_one_row_a_sequence(name: str, q, seq_lens) -> None:
    """Checks that decode's queries have a row for each sequence.

    Raises:
        ValueError: They do not.
    """
    if q.shape[0] != seq_lens.shape[0]:
        raise ValueError(
            f"`{name}` must have one row of queries a sequence. "
            f"Got {name}.shape={q.shape}, seq_lens.shape={seq_lens.shape}."
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


def check_layer_index(layer_index, num_layers: int) -> None:
    """Checks which of some layers is meant, as far as its value is known.

    Raises:
        ValueError: It is no integer, or out of range.
    """
    if isinstance(layer_index, bool) or not (isinstance(layer_index, int) or hasattr(layer_index, "dtype")):
        raise ValueError(f"`layer_index` must be an int or an int32 scalar. Got layer_index={layer_index!r}.")
    if not isinstance(layer_index, int):
        check_int32("layer_index", layer_index, ())
    # JAX would wrap -1 to the last layer and clamp what lies past it.
    if not isinstance(layer_index, Tracer) and not 0 <= int(layer_index) < num_layers:
        raise ValueError(f"`layer_index` must be in 0 .. {num_layers - 1}. Got layer_index={int(layer_index)}.")


def check_dtypes(q_name: str, q, kv_name: str, kv) -> None:
    """Checks that queries and keys are of one dtype, or the keys fp8.

    Raises:
        ValueError: They are not.
    """
    for name, array in ((q_name, q), (kv_name, kv)):
        check_float(name, array)
    if q.dtype.name in _FP8 and kv.dtype.name not in _FP8:
        raise ValueError(
            f"`{q_name}` in fp8 needs `{kv_name}` in fp8. Got {q_name}.dtype={q.dtype}, {kv_name}.dtype={kv.dtype}."
        )
    if kv.dtype.name not in _FP8:
        same_dtype(q_name, q, kv_name, kv)


def check_float(name: str, array) -> None:
    """Checks that an array is of a dtype that is taken.

    Raises:
        ValueError: It is not.
    """
    if array.dtype.name not in _FLOATS + _FP8:
        raise ValueError(f"`{name}` must be one of {', '.join(_FLOATS + _FP8)}. Got {name}.dtype={array.dtype}.")


def check_options(
    options: AttentionOptions, *, num_seqs: int, q_shape: tuple[int, ...], num_layers: int | None, spec: AttentionSpec
) -> None:
    """Checks the optional arguments of a call whose pages have `num_layers`, None without that axis.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    for name, shape in (("q_start", (num_seqs,)), ("kv_start", (num_seqs,)), ("q_positions", q_shape)):
        if getattr(options, name) is not None:
            check_int32(name, getattr(options, name), shape)
    mask = options.custom_mask
    if mask is not None:
        check_are_arrays(custom_mask=mask)
        if mask.dtype != jnp.bool_ or mask.ndim != 1:
            raise ValueError(
                f"`custom_mask` must be bool [M]. Got custom_mask.dtype={mask.dtype}, custom_mask.shape={mask.shape}."
            )
    for name in ("alibi_slopes", "sinks"):
        check_one_a_head(name, getattr(options, name), spec)
    heads = spec.num_kv_heads
    check_scale("q_scale", options.q_scale, heads, rows=num_seqs, row="sequence")
    for name in ("k_scale", "v_scale"):
        check_scale(name, getattr(options, name), heads, rows=num_layers, row="layer")


def check_one_a_head(name: str, array, spec: AttentionSpec) -> None:
    """Checks numbers, or None, for each query head.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    if array is None:
        return
    check_are_arrays(**{name: array})
    if array.shape != (spec.num_q_heads,) or array.dtype.name not in _FLOATS:
        raise ValueError(
            f"`{name}` must be floats [num_q_heads={spec.num_q_heads}]. "
            f"Got {name}.dtype={array.dtype}, {name}.shape={array.shape}."
        )


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
) -> None:
    """Checks rows that are to be written into pages, and their scales.

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


def check_scale(name: str, scale, num_kv_heads: int, *, rows: int | None, row: str) -> None:
    """Checks a scale; the number of its axes alone says what it is for.

    Args:
        rows: Of a scale of two axes, each for one `row`; None if it may not have two.

    Raises:
        ValueError: Its shape or dtype is wrong.
    """
    if scale is None:
        return
    if not hasattr(scale, "dtype"):
        raise ValueError(f"`{name}` must be None or an array of floats. Got {name}={scale!r}.")
    forms = {(): "a scalar", (num_kv_heads,): f"[{num_kv_heads}] (one a KV head)"}
    if rows is not None:
        forms[rows, num_kv_heads] = f"[{rows}, {num_kv_heads}] (one row a {row})"
    if scale.dtype.name not in _FLOATS or scale.shape not in forms:
        raise ValueError(
            f"`{name}` must be floats, {' or '.join(forms.values())}. "
            f"Got {name}.dtype={scale.dtype}, {name}.shape={scale.shape}."
        )
