"""Work lists of decode: every key in exactly one part, workers with nearly equal shares, within the static bound."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn_kernels import AttentionSpec, make_schedule
from jattn_kernels.lowering.split_schedule import split_at_multiples, split_evenly
from tests.often import slow

SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)


# Few shapes, each compiled once.
SIZES = ((1, 7), (4, 3), (12, 20), (9, 1))


@functools.partial(jax.jit, static_argnames=("block_kv", "workers"))
def split(lens, *, block_kv, workers):
    return split_evenly(jnp.zeros_like(lens), lens, block_kv=block_kv, workers=workers)


def starts_of(schedule, workers):
    """Where each worker's work tiles begin, and where the last one's end; what stands beside them is checked."""
    work_tiles, rows = np.asarray(schedule.work_tiles), np.asarray(schedule.workers)
    assert rows.shape == (workers, 7)
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, 1])
    for begin, end, *first in rows:
        assert first == (work_tiles[begin].tolist() if begin < end else [0] * 5)
    return np.append(rows[:, 0], rows[-1, 1])


@given(data=st.data(), size=st.sampled_from(SIZES))
@settings(max_examples=100, derandomize=True)
def test_split_deals_out_every_tile_evenly(data, size):
    batch_size, workers = size
    lens = data.draw(st.lists(st.integers(0, 400), min_size=batch_size, max_size=batch_size))
    schedule = split(jnp.array(lens, jnp.int32), block_kv=16, workers=workers)
    work_tiles, starts = np.asarray(schedule.work_tiles), starts_of(schedule, workers)
    used = work_tiles[: starts[-1]]
    tiles = [-(-length // 16) for length in lens]
    assert work_tiles.shape == (len(lens) + workers - 1, 5)
    assert used[:, 0].tolist() == sorted(used[:, 0])
    for sequence, count in enumerate(tiles):
        own = used[used[:, 0] == sequence]
        assert (own[:, 3] == len(own)).all()
        assert len(own) >= 1
        assert [tile for _, first, end, *_ in own for tile in range(first, end)] == list(range(count))
    bounds = np.searchsorted(used[:, 0], np.arange(len(lens) + 1)).tolist()
    cut = [[i, first, end] for i, (first, end) in enumerate(itertools.pairwise(bounds)) if end - first > 1]
    assert schedule.split.tolist() == cut + [[-1] * 3] * (len(schedule.split) - len(cut))
    assert (np.diff(starts) >= 0).all()
    assert starts[0] == 0
    work = [(work_tiles[a:b, 2] - work_tiles[a:b, 1]).sum() for a, b in itertools.pairwise(starts)]
    even = -(-sum(tiles) // workers)
    assert max(work) <= even * 16 // 15


@pytest.mark.parametrize(
    ("lens", "counts"), [((640, 640), [2, 2]), ((1280, 16), [4, 1]), ((0, 64), [1, 4]), ((16, 32, 16), [1, 2, 1])]
)
def test_split_cuts_where_a_share_ends(lens, counts):
    schedule = split(jnp.array(lens, jnp.int32), block_kv=16, workers=4)
    work_tiles = np.asarray(schedule.work_tiles)[: schedule.workers[-1, 1]]
    assert np.unique(work_tiles[:, 0], return_counts=True)[1].tolist() == counts


@pytest.mark.parametrize(
    ("lens", "workers", "parts", "share"),
    [
        ((1024,) * 32, 33, 32, 64),  # with all workers shares of 63 tiles, and every sequence cut
        ((1024,) * 31, 33, 31, 64),
        ((1024,) * 30, 33, 62, 59),  # three workers would be too many, and shares of 64 too large
        ((1024,) * 15, 33, 46, 30),  # three workers, though shares of 32 would do
        ((768,) * 10, 33, 40, 15),  # shares of 16 would spare a third
        ((1120,) * 16, 33, 32, 35),  # halves instead of thirds
        ((1024,) * 16 + (0,) * 3, 17, 19, 64),
        ((1024, 1104) * 16, 33, 64, 65),  # nothing to be spared
        ((160,) * 15, 15, 15, 10),  # cut nowhere with all workers
        ((16,) * 10, 33, 10, 1),
        ((128,) * 4, 33, 32, 1),  # one worker less would have to do two tiles
        ((224,) * 14, 33, 42, 6),  # shares of 7 would be too large
        ((256,) * 30, 33, 30, 16),  # a fifteenth more is the most
        ((240,) * 29, 33, 58, 14),  # a fourteenth
        ((144,) * 28, 33, 56, 8),  # an eighth
        ((5120,), 33, 32, 10),
    ],
)
def test_split_spares_cuts_where_few_workers_stay_idle_for_it(lens, workers, parts, share):
    schedule = split(jnp.array(lens, jnp.int32), block_kv=16, workers=workers)
    work_tiles, starts = np.asarray(schedule.work_tiles), starts_of(schedule, workers)
    assert starts[-1] == parts
    assert max((work_tiles[a:b, 2] - work_tiles[a:b, 1]).sum() for a, b in itertools.pairwise(starts)) == share


@pytest.mark.parametrize(
    ("tiles", "facts", "share"),
    [
        (8, {}, 1),
        (8, {"at_once": 4, "least_share": 2}, 2),
        (5, {"at_once": 4, "least_share": 2}, 2),
        (4, {"at_once": 4, "least_share": 2}, 1),
        (8, {"at_once": 1, "least_share": 2}, 2),
        (8, {"at_once": 1}, 4),
        (40, {"at_once": 4, "least_share": 2}, 5),
    ],
)
def test_split_cuts_little_to_no_less_than_a_least_share(tiles, facts, share):
    lens = jnp.array([tiles * 16], jnp.int32)
    schedule = split_evenly(jnp.zeros_like(lens), lens, block_kv=16, workers=8, **facts)
    parts = np.asarray(schedule.work_tiles)[: -(-tiles // share)]
    assert (parts[:, 2] - parts[:, 1]).tolist() == [min(share, tiles - first) for first in range(0, tiles, share)]


@pytest.mark.parametrize("lens", [(640, 70, 0, 33), (0, 0), slow((16,)), slow((320, 320, 320))])
def test_split_at_multiples_cuts_every_sequence_there(lens):
    ends = jnp.array(lens, jnp.int32)
    schedule = split_at_multiples(jnp.zeros_like(ends), ends, block_kv=16, tiles_per_split=4, max_keys=640, workers=3)
    work_tiles, starts = np.asarray(schedule.work_tiles), starts_of(schedule, 3)
    assert starts[0] == 0
    parts = [
        (i, 4 * part, min(4 * part + 4, -(-n // 16))) for i, n in enumerate(lens) for part in range(-(-n // 64) or 1)
    ]
    assert [tuple(row) for row in work_tiles[: starts[-1], :3].tolist()] == parts


def test_split_is_the_same_in_jit():
    lens = jnp.array([7, 300, 0, 64], jnp.int32)
    expected = split_evenly(jnp.zeros_like(lens), lens, block_kv=64, workers=3)
    traced = split(lens, block_kv=64, workers=3)
    assert jax.tree.structure(traced) == jax.tree.structure(expected)
    np.testing.assert_array_equal(traced.work_tiles, expected.work_tiles)
    np.testing.assert_array_equal(traced.workers, expected.workers)


def test_make_schedule_is_none_where_the_implementation_needs_none():
    lens, offsets = jnp.array([5], jnp.int32), jnp.array([0, 5], jnp.int32)
    facts = {"spec": SPEC, "dtype": jnp.bfloat16, "page_size": 16, "implementation": "xla"}
    assert make_schedule(lens, num_tokens=1, **facts) is None
    assert make_schedule(lens, offsets, num_tokens=5, **facts) is None
