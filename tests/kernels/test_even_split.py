"""The kernel that cuts sequences evenly: the same numbers as plain loops over sequences and workers give."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn_kernels import AttentionSpec
from jattn_kernels.call import AttentionOptions, default_device
from jattn_kernels.lowering import split_schedule
from jattn_kernels.lowering.token_bounds import sequence_bounds
from jattn_kernels.mosaic.sm90.common.even_split import fits, split_evenly, split_seen
from tests.kernels.harness.interpreter import interpreted

HOPPER = (9, 0)
BLOCK = 64
# Sequences, workers, whether keys are hidden at the beginning, and the other facts.
SMALL = [
    (1, 33, False, {}),
    (3, 40, False, {"at_once": 20, "least_share": 2}),
    (7, 7, True, {"at_once": 3, "least_share": 2}),
    (20, 17, True, {}),
]
SIZES = [
    *SMALL,
    (1, 264, False, {"at_once": 132, "least_share": 2}),
    (2, 264, False, {}),
    (8, 1, True, {}),
    (64, 33, False, {}),
    (64, 33, True, {}),
    (64, 132, False, {"at_once": 66, "least_share": 2}),
    (200, 66, True, {"at_once": 33, "least_share": 2}),
    (256, 33, False, {}),
    (256, 264, True, {}),
    (512, 16, False, {}),
]


def cut_by_loops(first_keys, end_keys, *, workers, at_once=None, least_share=4):
    """Work tiles, workers and split sequences, as `DecodeSchedule` has them."""
    ranges = []
    for first, end in zip(first_keys, end_keys, strict=True):
        ranges.append((first // BLOCK, -(-end // BLOCK)) if first < end else (first // BLOCK,) * 2)
    begins = np.cumsum([0, *(end - first for first, end in ranges)]).tolist()
    total, share = begins[-1], share_by_loops(begins, workers)
    if at_once is not None:
        share = max(share, min(-(-total // at_once), least_share))
    tiles, of_tiles, split = [], [], []
    for i, (first, end) in enumerate(ranges):
        shift, worker = first - begins[i], min(begins[i] // share, workers - 1)
        bounds = [(max(begins[i], w * share), min(begins[i + 1], (w + 1) * share)) for w in range(worker, workers)]
        parts = [part for part in bounds if part[0] < part[1]] if end > first else [(begins[i], begins[i])]
        if len(parts) > 1:
            split.append([i, len(tiles), len(tiles) + len(parts)])
        of_tiles += range(worker, worker + len(parts))
        tiles += [[i, a + shift, b + shift, len(parts), end_keys[i]] for a, b in parts]
    used, most = len(tiles), len(ranges) + workers - 1
    # Those behind the last have none of its tiles, as if it went on.
    last, shift, worker = tiles[-1], ranges[-1][0] - begins[-2], of_tiles[-1]
    for number in range(1, most - used + 1):
        begin = max(begins[-2], (worker + number) * share) + shift
        tiles.append([last[0], begin, begin, last[3], last[4]])
    rows = []
    for w in range(workers):
        begin, end = (sum(worker < bound for worker in of_tiles) for bound in (w, w + 1))
        rows.append([begin, end, *(tiles[begin] if begin < end else [0] * 5)])
    split += [[-1] * 3] * (min(len(ranges), workers) - len(split))
    return tiles, rows, split


def share_by_loops(begins, workers):
    """Tiles of a worker."""

    def cuts(share):
        return sum(max(0, (end - 1) // share - begin // share) for begin, end in itertools.pairwise(begins))

    shares = [max(1, -(-begins[-1] // (workers - idle))) for idle in range(workers // 16 + 1 if len(begins) > 2 else 1)]
    of_all = cuts(shares[0])
    fitting = [s for s in shares if 2 * cuts(s) <= of_all and 15 * s <= 16 * shares[0]]
    return fitting[0] if fitting else shares[0]


def random_keys(random, count, *, narrow):
    """First and end keys: of any lengths, of one length, some or all empty."""
    most = random.choice([1, 64, 200, 4000, 131072, 2**30 // count])
    ends = random.integers(0, most, count, endpoint=True)
    match random.integers(6):
        case 0:
            ends[random.random(count) < 0.5] = 0
        case 1:
            ends[:] = ends[0]
        case 2:
            ends[-(-count // 3) :] = 0
        case 3 if random.integers(3) == 0:
            ends[:] = 0
    firsts = random.integers(0, most, count, endpoint=True) if narrow else np.zeros(count, int)
    empty = random.random(count) < 0.1
    return np.where(empty, firsts, np.minimum(firsts, ends)), ends


def assert_same(cut, sizes, *, draws):
    """That `cut`, of first and end keys, gives what the loops give."""
    batch_size, workers, narrow, facts = sizes
    random = np.random.default_rng([batch_size, workers])
    compiled = jax.jit(functools.partial(cut, block_kv=BLOCK, workers=workers, **facts))
    for _ in range(draws):
        firsts, ends = random_keys(random, batch_size, narrow=narrow)
        schedule = compiled(jnp.array(firsts, jnp.int32) if narrow else None, jnp.array(ends, jnp.int32))
        expected = cut_by_loops(firsts.tolist(), ends.tolist(), workers=workers, **facts)
        for found, of_loops in zip((schedule.work_tiles, schedule.workers, schedule.split), expected, strict=True):
            np.testing.assert_array_equal(found, np.array(of_loops, np.int64))


@pytest.mark.parametrize("sizes", SMALL, ids=str)
def test_the_kernel_cuts_as_loops_do(sizes):
    with interpreted():
        assert_same(split_evenly, sizes, draws=6)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_xla_cuts_as_loops_do(sizes):
    def cut(firsts, ends, **facts):
        return split_schedule.split_evenly(jnp.zeros_like(ends) if firsts is None else firsts, ends, **facts)

    assert_same(cut, sizes, draws=20)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_on_a_gpu_the_kernel_cuts_as_loops_do(sizes):
    if default_device().compute_capability != HOPPER:
        pytest.skip("only Hopper has this kernel")
    assert_same(split_evenly, sizes, draws=40)


def test_the_longest_sequence_there_is_can_be_cut():
    longest = jnp.array([2**31 - 1], jnp.int32)
    with interpreted():
        schedule = split_evenly(None, longest, block_kv=BLOCK, workers=2)
    assert schedule.work_tiles.tolist() == [[0, 0, 2**24, 2, 2**31 - 1], [0, 2**24, 2**25, 2, 2**31 - 1]]


@pytest.mark.parametrize(("batch_size", "tiles_per_split"), [(8, None), (8, 4), (600, None)])
@pytest.mark.parametrize("window", [None, 100])
def test_what_is_lowered_for_a_gpu_has_the_kernel_where_it_serves(batch_size, tiles_per_split, window):
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=8, head_dim=64, window_left=window)

    def cut(lens):
        bounds = sequence_bounds(lens, AttentionOptions(), spec, 1)
        return split_seen(bounds, spec, tiles_per_split, 4096, block_kv=BLOCK, workers=16)

    lens = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    text = jax.jit(cut).trace(lens).lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu_v2" in text) == (batch_size == 8 and tiles_per_split is None)
    assert fits(batch_size, 16) == (batch_size == 8)
