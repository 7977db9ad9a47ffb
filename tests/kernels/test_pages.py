"""Writing and copying pages: against a NumPy loop, with slots that lead nowhere, and in place."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import (
    AttentionSpec,
    copy_pages,
    paged_decode,
    ragged_extend,
    read_latent_pages,
    write_latent_pages,
    write_pages,
)

PAGES, PAGE_SIZE, HEADS, WIDTH, LAYERS = 5, 4, 2, 3, 3
SLOTS = np.array([7, 19, -1, 20, 0, 2**31 - 1, -20, 8], np.int32)
POOLS = list(itertools.product(("NHD", "HND"), (None, "pages_first", "kv_first"), (None, 2)))


def pool_shape(num_pages, layout, combined, layer_index, width=WIDTH):
    shape = (PAGE_SIZE, HEADS, width) if layout == "NHD" else (HEADS, PAGE_SIZE, width)
    shape = {None: (num_pages,), "pages_first": (num_pages, 2), "kv_first": (2, num_pages)}[combined] + shape
    return shape if layer_index is None else (LAYERS, *shape)


def row_of(pool, kv_index, slot, layout, combined, layer_index):
    """A view of one row, [K, H], found the slow way."""
    view = pool if layer_index is None else pool[layer_index]
    page, offset = divmod(slot, PAGE_SIZE)
    match combined:
        case None:
            view = view[page]
        case "pages_first":
            view = view[page, kv_index]
        case "kv_first":
            view = view[kv_index, page]
    return view[offset] if layout == "NHD" else view[:, offset]


@pytest.mark.parametrize(("layout", "combined", "layer_index"), POOLS)
def test_write_pages_writes_the_rows_in_range_and_nothing_else(layout, combined, layer_index):
    rng = np.random.default_rng(0)
    v_width = WIDTH if combined else WIDTH + 1
    k = rng.standard_normal((len(SLOTS), HEADS, WIDTH)).astype(np.float32)
    v = rng.standard_normal((len(SLOTS), HEADS, v_width)).astype(np.float32)
    pools = [np.full(pool_shape(PAGES, layout, combined, layer_index), np.nan, np.float32)]
    if combined is None:
        pools.append(np.full(pool_shape(PAGES, layout, combined, layer_index, v_width), np.nan, np.float32))
    arrays = [jnp.asarray(pool) for pool in pools] + [None] * (2 - len(pools))
    written = write_pages(
        *arrays,
        jnp.asarray(k),
        jnp.asarray(v),
        jnp.asarray(SLOTS),
        layout=layout,
        combined_pool=combined,
        layer_index=None if layer_index is None else jnp.int32(layer_index),
    )
    for t, slot in enumerate(SLOTS.tolist()):
        if 0 <= slot < PAGES * PAGE_SIZE:
            row_of(pools[0], 0, slot, layout, combined, layer_index)[:] = k[t]
            row_of(pools[-1], 1, slot, layout, combined, layer_index)[:] = v[t]
    np.testing.assert_array_equal(written[0], pools[0])
    if combined is None:
        np.testing.assert_array_equal(written[1], pools[1])
    else:
        assert written[1] is None


def rows(values, dtype=jnp.float32):
    return jnp.broadcast_to(jnp.asarray(values, dtype)[:, None, None], (len(values), HEADS, WIDTH))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_write_pages_rounds_to_the_dtype_of_the_pages(dtype):
    pages = jnp.zeros(pool_shape(PAGES, "NHD", None, None), dtype)
    written, _ = write_pages(pages, pages, rows([1 / 3]), rows([2.0]), jnp.zeros(1, jnp.int32))
    np.testing.assert_array_equal(written[0, 0], jnp.full((HEADS, WIDTH), 1 / 3, dtype))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_write_pages_clips_scaled_rows_to_the_range_of_fp8(dtype):
    limit = float(jnp.finfo(dtype).max)
    pages = jnp.zeros(pool_shape(PAGES, "NHD", None, None), dtype)
    values = rows([8.0, 1e6, -1e6])
    k_pages, v_pages = write_pages(
        pages,
        pages,
        values,
        values,
        jnp.arange(3, dtype=jnp.int32),
        k_scale=jnp.float32(4),
        v_scale=jnp.array([2.0, 8.0]),
    )
    np.testing.assert_array_equal(k_pages[0, :3, 0, 0].astype(jnp.float32), [2, limit, -limit])
    np.testing.assert_array_equal(v_pages[0, 0, :, 0].astype(jnp.float32), [4, 1])


def test_write_pages_divides_by_the_scales_of_the_layer():
    pages = jnp.zeros(pool_shape(PAGES, "NHD", None, 1), jnp.float8_e4m3fn)
    scales = jnp.array([[1.0, 1.0], [2.0, 8.0], [1.0, 1.0]])
    slots, values = jnp.zeros(1, jnp.int32), rows([16.0])
    written, unscaled = write_pages(pages, pages, values, values, slots, layer_index=jnp.int32(1), k_scale=scales)
    np.testing.assert_array_equal(written[1, 0, 0, :, 0].astype(jnp.float32), [8, 2])
    np.testing.assert_array_equal(unscaled[1, 0, 0, :, 0].astype(jnp.float32), [16, 16])


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_write_pages_rounds_to_the_nearest_fp8_and_attention_reads_it_back(dtype):
    rng = np.random.default_rng(0)
    scale = jnp.array([0.25, 3.0])
    k, v = (jnp.asarray(rng.standard_normal((5, HEADS, 8)) * 4, jnp.float32) for _ in range(2))
    pages = jnp.zeros((PAGES, PAGE_SIZE, HEADS, 8), dtype)
    slots = jnp.arange(4, 9, dtype=jnp.int32)
    k_pages, v_pages = write_pages(pages, pages, k, v, slots, k_scale=scale, v_scale=scale)
    stored_k, stored_v = (
        np.asarray(pool).reshape(-1, HEADS, 8)[4:9].astype(np.float32) * np.asarray(scale)[:, None]
        for pool in (k_pages, v_pages)
    )
    # Half a step between neighbours, and below the smallest normal number half of a fixed one.
    step = float(jnp.finfo(dtype).eps) / 2
    floor = float(jnp.finfo(dtype).smallest_subnormal) / 2 * np.asarray(scale)[:, None]
    for exact, stored in ((k, stored_k), (v, stored_v)):
        assert (np.abs(stored - exact) <= step * np.abs(exact) + floor).all()
    spec = AttentionSpec(num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=8)
    q, table, lens = k[:1, None], jnp.array([[1, 2]], jnp.int32), jnp.array([5], jnp.int32)
    out = paged_decode(q, k_pages, v_pages, table, lens, spec=spec, k_scale=scale, v_scale=scale)
    offsets = jnp.array([0, 1], jnp.int32), jnp.array([0, 5], jnp.int32)
    plain = ragged_extend(q[0], jnp.asarray(stored_k), jnp.asarray(stored_v), *offsets, spec=spec)
    np.testing.assert_allclose(out[0], plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer_index", [None, 2])
def test_write_latent_pages_writes_the_rows_in_range_and_nothing_else(layer_index):
    rng = np.random.default_rng(0)
    c_kv, k_pe = (rng.standard_normal((len(SLOTS), width)).astype(np.float32) for width in (5, 2))
    pool = np.full((*([] if layer_index is None else [LAYERS]), PAGES, PAGE_SIZE, 7), np.nan, np.float32)
    index = None if layer_index is None else jnp.int32(layer_index)
    arguments = (jnp.asarray(x) for x in (pool, c_kv, k_pe, SLOTS))
    written = write_latent_pages(*arguments, layer_index=index)
    view = pool if layer_index is None else pool[layer_index]
    for t, slot in enumerate(SLOTS.tolist()):
        if 0 <= slot < PAGES * PAGE_SIZE:
            view[slot // PAGE_SIZE, slot % PAGE_SIZE] = [*c_kv[t], *k_pe[t]]
    np.testing.assert_array_equal(written, pool)


def test_write_latent_pages_clips_scaled_rows_to_the_range_of_fp8():
    pages = jnp.zeros((LAYERS, PAGES, PAGE_SIZE, 2), jnp.float8_e4m3fn)
    rows, slots = jnp.array([[8.0], [1e6]]), jnp.array([0, 5], jnp.int32)
    written = write_latent_pages(pages, rows, rows, slots, layer_index=1, kv_scale=jnp.array([[1.0], [4.0], [1.0]]))
    np.testing.assert_array_equal(written[1, 0, 0].astype(jnp.float32), [2, 2])
    np.testing.assert_array_equal(written[1, 1, 1].astype(jnp.float32), [448, 448])
    assert (written[jnp.array([0, 2])] == 0).all()


@pytest.mark.parametrize("layer_index", [None, 2])
def test_read_latent_pages_gives_the_rows_in_range_and_zeros_elsewhere(layer_index):
    shape = (*([] if layer_index is None else [LAYERS]), PAGES, PAGE_SIZE, 7)
    pool = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    index = None if layer_index is None else jnp.int32(layer_index)
    rows = read_latent_pages(jnp.asarray(pool), jnp.asarray(SLOTS), layer_index=index)
    flat = (pool if layer_index is None else pool[layer_index]).reshape(-1, 7)
    expected = [flat[slot] if 0 <= slot < len(flat) else np.zeros(7) for slot in SLOTS.tolist()]
    np.testing.assert_array_equal(rows, expected)


def test_read_latent_pages_multiplies_rows_in_fp8_with_their_layers_scale():
    pages, slots = jnp.full((LAYERS, PAGES, PAGE_SIZE, 2), 3.0, jnp.float8_e4m3fn), jnp.array([0, 5], jnp.int32)
    rows = read_latent_pages(pages, slots, layer_index=1, kv_scale=jnp.array([[1.0], [0.5], [1.0]]))
    np.testing.assert_array_equal(rows, np.full((2, 2), 1.5, np.float32))


def test_write_latent_pages_is_in_place_in_a_scan_over_layers():
    def write(pages, c_kv, k_pe, slots):
        def layer(pages, index):
            return write_latent_pages(pages, c_kv, k_pe, slots, layer_index=index), None

        return jax.lax.scan(layer, pages, jnp.arange(LAYERS, dtype=jnp.int32))[0]

    temporary = []
    for num_pages in (64, 4096):
        pages = jax.ShapeDtypeStruct((LAYERS, num_pages, PAGE_SIZE, 7), jnp.bfloat16)
        c_kv, k_pe = (jax.ShapeDtypeStruct((2, width), jnp.float32) for width in (5, 2))
        memory = compiled_memory(write, pages, c_kv, k_pe, jax.ShapeDtypeStruct((2,), jnp.int32), donate=(0,))
        assert memory.alias_size_in_bytes == pages.size * 2
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


def compiled_memory(function, *shapes, donate):
    return jax.jit(function, donate_argnums=donate).lower(*shapes).compile().memory_analysis()


@pytest.mark.parametrize(("layout", "combined", "layer_index"), [pool for pool in POOLS if pool[2] is not None])
def test_write_pages_is_in_place_in_a_scan_over_layers(layout, combined, layer_index):
    def write(k_pages, v_pages, k, slots):
        def layer(pools, index):
            return write_pages(*pools, k, k, slots, layout=layout, combined_pool=combined, layer_index=index), None

        return jax.lax.scan(layer, (k_pages, v_pages), jnp.arange(LAYERS, dtype=jnp.int32))[0]

    temporary = []
    for num_pages in (64, 4096):
        pages = jax.ShapeDtypeStruct(pool_shape(num_pages, layout, combined, layer_index), jnp.bfloat16)
        row = jax.ShapeDtypeStruct((2, HEADS, WIDTH), jnp.float32)
        v_pages = None if combined else pages
        slots = jax.ShapeDtypeStruct((2,), jnp.int32)
        memory = compiled_memory(write, pages, v_pages, row, slots, donate=(0, 1) if v_pages is not None else (0,))
        assert memory.alias_size_in_bytes == pages.size * pages.dtype.itemsize * (1 if combined else 2)
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


def test_copy_pages_copies_what_was_there_before():
    pages = jnp.arange(PAGES, dtype=jnp.float32)[:, None, None, None] * jnp.ones((PAGES, PAGE_SIZE, HEADS, WIDTH))
    src, dst = jnp.array([0, 1, 2, 3], jnp.int32), jnp.array([1, 0, -1, PAGES], jnp.int32)
    copied = copy_pages(pages, src, dst)
    np.testing.assert_array_equal(copied[:, 0, 0, 0], [1, 0, 2, 3, 4])


def test_copy_pages_of_stacked_layers_copies_in_each():
    pages = jnp.arange(LAYERS * PAGES, dtype=jnp.float32).reshape(LAYERS, PAGES, 1, 1, 1)
    copied = copy_pages(pages, jnp.array([4], jnp.int32), jnp.array([0], jnp.int32), axis=1)
    np.testing.assert_array_equal(copied[:, 0, 0, 0, 0], [4, 9, 14])
    np.testing.assert_array_equal(copied[:, 1:], pages[:, 1:])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_copy_pages_is_in_place_when_donated(axis):
    indices = jax.ShapeDtypeStruct((2,), jnp.int32)
    temporary = []
    for num_pages in (64, 4096):
        shape = (*(2,) * axis, num_pages, PAGE_SIZE, HEADS, WIDTH)
        pages = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        memory = compiled_memory(functools.partial(copy_pages, axis=axis), pages, indices, indices, donate=(0,))
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *[({"axis": axis}, "`axis` must be one of `pages`, counted from 0") for axis in (-1, 4, 7, True, 1.0)],
        ({"pages": [[1.0]]}, "`pages`"),
        ({"src": [0]}, "`src`"),
        ({"dst": jnp.zeros(2, jnp.int32)}, "`dst`"),
    ],
)
def test_copy_pages_says_what_is_wrong(change, sentence):
    index = jnp.zeros(1, jnp.int32)
    given = {"pages": jnp.zeros((PAGES, PAGE_SIZE, HEADS, WIDTH)), "src": index, "dst": index}
    with pytest.raises(ValueError, match=sentence):
        inspect.unwrap(copy_pages)(**(given | change))


def test_pages_of_numpy_are_taken():
    pages = np.zeros((PAGES, PAGE_SIZE, HEADS, WIDTH), np.float32)
    slots, index = np.array([3], np.int32), np.array([1], np.int32)
    row = np.ones((1, HEADS, WIDTH), np.float32)
    k_pages, v_pages = inspect.unwrap(write_pages)(pages, pages, row, row, slots)
    assert (k_pages[0, 3] == 1).all()
    assert (v_pages[0, 3] == 1).all()
    latent = inspect.unwrap(write_latent_pages)(pages[:, :, 0], row[:, 0, :1], row[:, 0, 1:], slots)
    assert (latent[0, 3] == 1).all()
    assert (inspect.unwrap(copy_pages)(pages + 2, index, index) == 2).all()
