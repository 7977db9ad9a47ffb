"""The blocks' shares of a grouped product of few tokens: all units once, and no share longer than it must be."""

import functools
import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn_kernels.call import Device
from jattn_kernels.mosaic.sm90.common import launch, tiles
from jattn_kernels.mosaic.sm90.experts.few_rows_shares import first_unit, share_of_units

FEW, MANY = 7, 9  # what a unit takes with up to eight rows, and with more
ROOM = 70  # of the work list
UNITS = 90  # of a tile


@functools.partial(jax.jit, static_argnums=(2, 3))
def all_bounds(rows, num_tiles, units, blocks):
    return jax.vmap(lambda bound: first_unit(rows, num_tiles, units, bound))(jnp.arange(blocks + 1))


def bounds_of(rows: list[int], units: int) -> np.ndarray:
    padded = np.array(rows + [0] * (ROOM - len(rows)), np.int32)
    return np.asarray(all_bounds(padded, len(rows), units, tiles.num_sms()))


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.integers(1, 16), min_size=1, max_size=ROOM), units=st.sampled_from([1, 3, 90]))
def test_blocks_have_all_units_in_shares_of_one_length(rows, units):
    bounds = bounds_of(rows, units)
    assert bounds[0] == 0
    assert bounds[-1] == len(rows) * units
    assert all(first <= end for first, end in itertools.pairwise(bounds))
    times = np.repeat([FEW if count <= 8 else MANY for count in rows], units)
    ends = np.concatenate([[0], np.cumsum(times)])[bounds]
    assert np.diff(ends).max() <= times.sum() / tiles.num_sms() + MANY


@pytest.mark.parametrize("few", [32, 33])
def test_a_share_of_tiles_of_few_rows_has_more_units(few):
    counts = np.diff(bounds_of([8] * few + [16] * few, 900))
    assert counts[0] / counts[-1] == pytest.approx(MANY / FEW, rel=0.01)


@pytest.mark.parametrize("count", [1, 32, 47])
def test_a_block_finds_its_share_in_the_interpreter(count, monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 3))
    with tiles.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
        assert_found(count)


def test_the_search_is_lowered_for_cuda(monkeypatch):
    monkeypatch.setattr("jattn_kernels.call.default_device", lambda: Device("gpu", (9, 0), 132))
    work, num_tiles = jax.ShapeDtypeStruct((ROOM, 3), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    assert "@mosaic_gpu_v2" in jax.jit(found).trace(work, num_tiles).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 31, 32, 33, 47, ROOM])
def test_a_block_finds_its_share_on_a_gpu(count):
    assert_found(count)


def assert_found(count: int) -> None:
    rows = np.random.default_rng(count).integers(1, 17, ROOM)
    work = np.stack([np.arange(ROOM), np.arange(ROOM), rows], axis=1).astype(np.int32)
    bounds = bounds_of(rows[:count].tolist(), UNITS)
    shares = found(jnp.asarray(work), jnp.array([count], jnp.int32))
    np.testing.assert_array_equal(shares, np.stack([bounds[:-1], bounds[1:]], axis=1))


def found(work: jax.Array, num_tiles: jax.Array) -> jax.Array:
    """What each block finds: the first of its units, and the first one behind them."""

    def body(work_ref, num_tiles_ref, out_ref):
        block = jax.lax.axis_index("block")
        for side, bound in enumerate(share_of_units(work_ref, num_tiles_ref[0], UNITS)):
            out_ref[block, side] = bound

    blocks = tiles.num_sms()
    out = jax.ShapeDtypeStruct((blocks, 2), jnp.int32)
    return launch.kernel(body, out_type=out, grid=(blocks,), grid_names=("block",))(work, num_tiles)
