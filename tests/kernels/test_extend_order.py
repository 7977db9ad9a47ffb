"""The order of extend's work tiles: which heads are done at a time, that none is left out, and that shares come out
even."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.mosaic.sm90.extend import order
from jattn_kernels.mosaic.sm90.extend.entry import make_schedule
from jattn_kernels.mosaic.sm90.extend.order import by_groups_of_heads
from tests.kernels.harness.case_table import assert_close, build
from tests.kernels.harness.extend_calls import PAGED, RAGGED, attend, derived, interpreted_in_few_blocks
from tests.kernels.harness.mosaic_calls import schedule_call
from tests.often import slow

_BLOCKS = 132


@pytest.fixture(autouse=True)
def of_an_h200(monkeypatch):
    monkeypatch.setattr("jattn_kernels.mosaic.sm90.extend.schedule.num_sms", lambda: _BLOCKS)


def schedule_of(heads, q_lens, **facts):
    spec = AttentionSpec(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=128, **facts)
    call = schedule_call("paged_extend", spec, sum(q_lens), "bfloat16")
    lens, offsets = (jnp.asarray(values, jnp.int32) for values in (q_lens, [0, *np.cumsum(q_lens)]))
    return jax.jit(make_schedule, static_argnums=(0, 3))(call, lens, offsets, None)


def work_tiles(schedule, head_blocks):
    """Query blocks and blocks of heads in the order in which the kernel has them."""
    used = int(schedule.num_query_blocks[0]) * head_blocks
    taken = np.arange(used) if schedule.order is None else np.asarray(schedule.order)[:used]
    return taken // head_blocks, taken % head_blocks


@pytest.mark.parametrize(
    ("heads", "q_lens", "at_once"),
    [
        ((32, 8), [8192], None),
        ((64, 8), [4096] * 4, None),
        ((32, 8), [8192] * 16, None),
        ((40, 8), [4096] * 4, None),
        ((16, 16), [8192], None),
        ((128, 128), [512], None),
        ((128, 128), [4] * 256, None),
        ((128, 128), [8192], 16),
        ((128, 128), [32768], 4),
        ((128, 128), [4096] * 4, 8),
        ((40, 40), [8192], 20),
        ((32, 32), [4096] * 4, 8),
        ((32, 16), [4096] * 4, 4),
    ],
)
def test_few_heads_are_done_at_a_time_only_where_blocks_would_not_share_keys(heads, q_lens, at_once):
    schedule = schedule_of(heads, q_lens)
    if at_once is None:
        assert schedule.order is None
        return
    _, head_blocks = work_tiles(schedule, heads[1])
    assert len(set(head_blocks[: at_once * int(schedule.num_query_blocks[0])])) == at_once


@pytest.mark.parametrize("used", [1, 6, 7])
@pytest.mark.parametrize(("head_blocks", "at_once"), [(1, 1), (6, 1), (6, 2), (12, 3)])
def test_every_work_tile_has_its_turn_once(used, head_blocks, at_once):
    turns = by_groups_of_heads(jnp.array([used], jnp.int32), most=7, head_blocks=head_blocks, at_once=at_once)
    np.testing.assert_array_equal(np.sort(turns[: used * head_blocks]), np.arange(used * head_blocks))
    np.testing.assert_array_equal(np.sort(turns), np.arange(7 * head_blocks))


def test_groups_of_heads_go_back_and_forth_and_the_last_one_to_the_shortest():
    turns = np.asarray(by_groups_of_heads(jnp.array([3], jnp.int32), most=4, head_blocks=4, at_once=2))
    backwards, forwards = [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)], [(0, 2), (0, 3), (1, 2), (1, 3), (2, 2)]
    expected = [query_block * 4 + heads for query_block, heads in [*backwards, *forwards, (2, 3)]]
    np.testing.assert_array_equal(turns[:12], expected)


@pytest.mark.parametrize(
    ("heads", "q_lens"),
    [(128, [8192]), (128, [4096] * 4), (128, [32768]), (40, [6000, 2000]), (32, [3000] * 4), (64, [7000, 60, 900])],
)
def test_blocks_of_the_grid_get_even_shares(heads, q_lens):
    schedule = schedule_of((heads, heads), q_lens)
    assert schedule.order is not None
    query_blocks, _ = work_tiles(schedule, heads)
    work = np.asarray(schedule.query_blocks)[query_blocks, 3] + 1.0  # and about a tile's time for each work tile itself
    rounds = -(-len(work) // _BLOCKS)
    by_round = np.pad(work, (0, rounds * _BLOCKS - len(work))).reshape(rounds, _BLOCKS)
    by_round[1::2] = by_round[1::2, ::-1].copy()  # as the kernel takes them, back and forth
    shares = by_round.sum(axis=0)
    assert shares.max() < 1.03 * shares.mean()


@pytest.mark.parametrize("among", [PAGED, slow(RAGGED)], ids=["paged", "ragged"])
def test_results_do_not_depend_on_the_order(monkeypatch, among):
    case = derived("groups_of_heads", among=among, of="padding", heads=(4, 2), q_lens=(130,), kv_lens=(140,))
    case = dataclasses.replace(case, custom_mask=False, padding_rows=0, padding_tokens=0)
    inputs = build(case)
    results = []
    for readers in (order._ENOUGH_READERS, 0):
        monkeypatch.setattr(order, "_LEAST_ROUNDS", 0.5)
        monkeypatch.setattr(order, "_ENOUGH_READERS", readers)
        with interpreted_in_few_blocks():
            results.append(attend(case, inputs))
    assert_close(case, inputs, *results[0])
    jax.tree.map(np.testing.assert_array_equal, *results)
