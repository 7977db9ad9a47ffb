"""The pool has the shapes that its groups ask for, and a write changes one layer of one group."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.kv_pool import KVGroupSpec, make_pool

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


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_page_bytes_are_those_of_the_arrays(spec, dtype):
    (group,) = make_pool((spec,), num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=dtype).groups
    assert spec.page_bytes(PAGE_SIZE, dtype) * NUM_PAGES == group.k.nbytes + group.v.nbytes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_pages": 1}, "`num_pages` must be at least 2, as page 0 is reserved. Got 1"),
        ({"num_pages": -1}, "`num_pages` must be at least 2, as page 0 is reserved. Got -1"),
        ({"page_size": 0}, "`page_size` must be at least 1. Got 0"),
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
