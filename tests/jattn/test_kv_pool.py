"""The pool has the shapes that its groups ask for, and a write changes one layer of one group."""

import dataclasses
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.kv_pool import KVGroupSpec, make_pool, pool_bytes
from jattn.page_lists import ALL_KEYS, AttentionSpan, WindowList
from jattn_kernels.packed_latents import unpack_latents

FULL = KVGroupSpec(name="full", num_layers=3, num_kv_heads=2, head_dim=8, v_head_dim=4)
WINDOWED = KVGroupSpec(name="windowed", num_layers=2, num_kv_heads=3, head_dim=8, page_layout="HND")
SPECS = (FULL, WINDOWED)
NUM_PAGES, PAGE_SIZE = 5, 4


@pytest.fixture
def pool():
    return make_pool(SPECS, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.bfloat16)


def test_pool_has_the_shapes_of_its_groups(pool):
    full, windowed = pool.groups
    assert (full.k.shape, full.v.shape) == ((3, 5, 4, 2, 8), (3, 5, 4, 2, 4))
    assert (windowed.k.shape, windowed.v.shape) == ((2, 5, 3, 4, 8), (2, 5, 3, 4, 8))
    assert [(group.name, group.page_layout) for group in pool.groups] == [("full", "NHD"), ("windowed", "HND")]
    for group in pool.groups:
        assert (group.num_pages, group.page_size, group.num_slots) == (5, 4, 20)
        assert group.k.dtype == group.v.dtype == jnp.bfloat16
        assert not group.k.any()
        assert not group.v.any()


def test_groups_of_a_window_have_the_pages_of_its_list():
    span = AttentionSpan(window_left=7)
    specs = (FULL, dataclasses.replace(WINDOWED, span=span), dataclasses.replace(FULL, span=AttentionSpan(3)))
    sizes = {"page_size": PAGE_SIZE, "dtype": jnp.bfloat16, "windows": [WindowList(span, 3)]}
    groups = make_pool(specs, num_pages=NUM_PAGES, **sizes).groups
    assert [(group.page_list, group.span, group.num_pages) for group in groups] == [
        (0, ALL_KEYS, 5),
        (1, span, 3),
        (0, ALL_KEYS, 5),
    ]
    assert pool_bytes(specs, num_pages=NUM_PAGES, **sizes) == sum(group.k.nbytes + group.v.nbytes for group in groups)
    with pytest.raises(ValueError, match=r"`num_pages` must be a whole number of at least 2, .* Got 1"):
        make_pool(specs, num_pages=NUM_PAGES, **sizes | {"windows": [WindowList(span, 1)]})


@pytest.mark.parametrize(
    ("span", "most", "pages"),
    [
        (ALL_KEYS, sys.maxsize, [0, 0, 0]),
        (AttentionSpan(window_left=0), 1, [0, 4, 10]),
        (AttentionSpan(window_left=6), 7, [-2, 2, 8]),
        (AttentionSpan(chunk_size=8), 8, [0, 4, 10]),
        (AttentionSpan(chunk_size=12), 12, [0, 3, 9]),
    ],
)
def test_span_begins_on_the_page_of_its_first_key(span, most, pages):
    assert span.most_keys == most
    assert [span.first_page(position, 4) for position in (0, 16, 41)] == pages


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_page_bytes_are_those_of_the_arrays(spec, dtype):
    (group,) = make_pool((spec,), num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=dtype).groups
    assert spec.page_bytes(PAGE_SIZE, dtype) * NUM_PAGES == group.k.nbytes + group.v.nbytes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_pages": 1}, "`num_pages` must be a whole number of at least 2, as page 0 is reserved. Got 1"),
        ({"num_pages": -1}, "`num_pages` must be a whole number of at least 2, as page 0 is reserved. Got -1"),
        ({"page_size": 0}, "`page_size` must be a whole number of at least 1. Got 0"),
    ],
)
def test_pool_without_room_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_pool(SPECS, **({"num_pages": NUM_PAGES, "page_size": PAGE_SIZE} | sizes), dtype=jnp.float32)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("group", [0, 1])
def test_write_changes_those_slots_of_one_layer_of_one_group(pool, group, traced):
    spec, layer = SPECS[group], 1
    slots = np.array([6, 19, 20], np.int32)  # the last one lies beyond the pool, so its row goes nowhere
    rng = np.random.default_rng(0)
    k = jnp.asarray(rng.normal(size=(3, spec.num_kv_heads, spec.head_dim)), jnp.bfloat16)
    v = jnp.asarray(rng.normal(size=(3, spec.num_kv_heads, spec.v_head_dim or spec.head_dim)), jnp.bfloat16)
    write = jax.jit(lambda p, layer: p.write(group, layer, jnp.asarray(slots), k, v))
    new = write(pool, jnp.int32(layer)) if traced else pool.write(group, layer, jnp.asarray(slots), k, v)

    expected = jax.tree.map(np.array, pool)
    for pages, rows in ((expected.groups[group].k, k), (expected.groups[group].v, v)):
        for slot, row in zip(slots[:2], rows, strict=False):
            page, place = divmod(int(slot), PAGE_SIZE)
            if spec.page_layout == "NHD":
                pages[layer, page, place] = row
            else:
                pages[layer, page, :, place] = row
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, new), expected)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer's place."""

    layer_id: int
    group: int
    v_head_dim: int


LATENT = KVGroupSpec(name="latent", num_layers=2, num_kv_heads=1, head_dim=8, v_head_dim=6, latent=True)


@pytest.mark.parametrize("group", [0, 1])
def test_buffers_hold_by_slot_what_was_set(pool, group):
    spec = SPECS[group]
    widths = (spec.head_dim, spec.v_head_dim or spec.head_dim)
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.normal(size=(3, spec.num_kv_heads, width)), jnp.bfloat16) for width in widths)
    loc = jnp.array([6, 19, 20], jnp.int32)  # the last one lies beyond the pool
    new = pool.set_kv_buffer(Layer(1, group, widths[1]), loc, k, v)
    keys, values = new.get_kv_buffer(1, group)
    assert keys.shape == (20, spec.num_kv_heads, widths[0])
    chex.assert_trees_all_equal(new.get_key_buffer(1, group), keys)
    for buffer, rows in ((keys, k), (values, v)):
        chex.assert_trees_all_equal(buffer[loc[:2]], rows[:2])
        assert np.count_nonzero(np.asarray(buffer, np.float32).any(axis=(1, 2))) == 2
    assert not new.get_key_buffer(0, group).any()


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_scaled_rows_are_clipped_to_the_stored_dtype(dtype):
    pool = make_pool((FULL,), num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=dtype)
    k, v = jnp.full((1, 2, 8), 3.0), jnp.full((1, 2, 4), 1e9)
    new = pool.set_kv_buffer(Layer(0, 0, 4), jnp.array([5], jnp.int32), k, v, jnp.float32(2), jnp.array([1.0, 1e9]))
    keys, values = (np.asarray(buffer[5], np.float32) for buffer in new.get_kv_buffer(0))
    assert (keys == 1.5).all()
    assert (values == np.array([[float(jnp.finfo(dtype).max)], [1.0]])).all()


def test_latent_rows_are_whole_keys_without_values():
    pool = make_pool((LATENT,), num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.float32)
    (group,) = pool.groups
    assert (group.k.shape, group.v, group.num_slots) == ((2, 5, 4, 8), None, 20)
    assert LATENT.page_bytes(PAGE_SIZE, jnp.float32) * NUM_PAGES == group.k.nbytes
    rows = jnp.arange(16.0).reshape(2, 1, 8)
    new = pool.set_kv_buffer(Layer(1, 0, 6), jnp.array([7, 20], jnp.int32), rows, rows[..., :6])
    buffer = np.asarray(new.get_key_buffer(1))
    assert buffer.shape == (20, 1, 8)
    assert (buffer[7] == np.arange(8)).all()
    assert np.count_nonzero(buffer.any(axis=(1, 2))) == 1
    with pytest.raises(ValueError, match=r"`get_kv_buffer` needs values. Got the latent group 'latent'"):
        new.get_kv_buffer(1)


def test_packed_rows_are_bytes_of_latents_alone():
    pool = make_pool((LATENT,), num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.uint8)
    (group,) = pool.groups
    chex.assert_shape(group.k, (2, 5, 4, 6 + 4 + 2 * 2))
    chex.assert_type(group.k, jnp.uint8)
    assert LATENT.page_bytes(PAGE_SIZE, jnp.uint8) * NUM_PAGES == group.k.nbytes
    rows = jnp.arange(16.0).reshape(2, 1, 8)
    new = pool.set_kv_buffer(Layer(1, 0, 6), jnp.array([7, 20], jnp.int32), rows, rows[..., :6])
    buffer = new.get_key_buffer(1)
    np.testing.assert_array_equal(unpack_latents(buffer[7, 0], 6), np.arange(8))
    assert np.count_nonzero(np.asarray(buffer).any(axis=(1, 2))) == 1
    with pytest.raises(ValueError, match=r"`cache_k` must be \[tokens, 1, 8\], the latent rows"):
        pool.set_kv_buffer(Layer(1, 0, 6), jnp.array([7, 20], jnp.int32), rows[..., 1:], rows[..., :6])
    with pytest.raises(ValueError, match=r"`kv_cache_dtype` may be fp8_ds_mla only where all layers read latent rows"):
        make_pool((LATENT, FULL), num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.uint8)


@pytest.mark.parametrize(
    "fields", [{"num_kv_heads": 2}, {"page_layout": "HND"}, {"v_head_dim": None}, {"v_head_dim": 8}]
)
def test_latent_rows_of_another_form_are_refused(fields):
    with pytest.raises(ValueError, match="`latent` needs num_kv_heads=1, page_layout='NHD' and a v_head_dim smaller"):
        dataclasses.replace(LATENT, **fields)
