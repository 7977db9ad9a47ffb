"""Batches of forward passes: each group's slots and pages, of its own list and as far as queries see."""

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.forward_batch import ForwardMode
from jattn.kv_pool import KVGroupSpec, make_pool
from jattn.page_lists import AttentionSpan, WindowList
from jattn.serving.steps.passes import decode_pass, ragged_pass, verify_pass

SPAN = AttentionSpan(window_left=5)
FULL = KVGroupSpec(name="full", num_layers=1, num_kv_heads=1, head_dim=8)
WINDOW = KVGroupSpec(name="window", num_layers=1, num_kv_heads=1, head_dim=8, span=SPAN)
PAGE = 4
POOL = make_pool((WINDOW, FULL, WINDOW), num_pages=30, page_size=PAGE, dtype="float32", windows=[WindowList(SPAN, 20)])
TABLES = [jnp.arange(1, 13, dtype=jnp.int32).reshape(2, 6), jnp.arange(101, 113, dtype=jnp.int32).reshape(2, 6)]
ROWS = jnp.array([True, True])


def batches():
    """Rows at positions 17 and 2; of three tokens each but in decode."""
    before = jnp.array([17, 2], jnp.int32)
    three = jnp.zeros((2, 3), jnp.int32)
    cu_q_lens = jnp.array([0, 3, 6], jnp.int32)
    return {
        "decode": decode_pass(POOL, TABLES, jnp.zeros(2, jnp.int32), before, ROWS),
        "verify": verify_pass(POOL, TABLES, three, before, ROWS),
        "extend": ragged_pass(POOL, TABLES, three.reshape(-1), before + 3, cu_q_lens, mode=ForwardMode.EXTEND),
    }


@pytest.mark.parametrize("name", ["decode", "verify", "extend"])
def test_groups_have_the_pages_of_their_list_and_page_0_before_a_window(name):
    """The query at 17 sees keys from 12 on, in page 3."""
    batch = batches()[name]
    window, full, other = map(np.asarray, batch.page_tables)
    np.testing.assert_array_equal(full, TABLES[0])
    np.testing.assert_array_equal(window, [[0, 0, 0, *range(104, 107)], range(107, 113)])
    np.testing.assert_array_equal(other, window)
    positions = np.asarray(batch.positions)
    assert positions.tolist() == ([17, 2] if name == "decode" else [17, 18, 19, 2, 3, 4])
    owner = np.repeat([0, 1], len(positions) // 2)
    for slots, table in zip(batch.out_cache_loc, (TABLES[1], TABLES[0], TABLES[1]), strict=True):
        pages = np.asarray(table)[owner, positions // PAGE]
        np.testing.assert_array_equal(slots, pages * PAGE + positions % PAGE)


def test_what_is_not_written_has_a_slot_out_of_its_groups_range():
    batch = decode_pass(POOL, TABLES, jnp.zeros(2, jnp.int32), jnp.array([17, 2], jnp.int32), ~ROWS)
    assert [slots.tolist() for slots in batch.out_cache_loc] == [[80, 80], [120, 120], [80, 80]]


def test_table_of_a_pool_with_one_list_is_every_groups():
    pool = make_pool((WINDOW, FULL), num_pages=30, page_size=PAGE, dtype="float32")
    batch = decode_pass(pool, TABLES[:1], jnp.zeros(2, jnp.int32), jnp.array([17, 2], jnp.int32), ROWS)
    for table in batch.page_tables:
        np.testing.assert_array_equal(table, TABLES[0])
