"""The blocks' shares of a grouped product of few tokens: all units once, and no share longer than it must be."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn_kernels.mosaic.sm90.common import tiles
from jattn_kernels.mosaic.sm90.experts.few_rows_shares import first_unit

FEW, MANY = 7, 9  # what a unit takes with up to eight rows, and with more
ROOM = 70  # of the work list


@functools.partial(jax.jit, static_argnums=2)
def all_bounds(rows, num_tiles, units):
    return jax.vmap(lambda bound: first_unit(rows, num_tiles, units, bound))(jnp.arange(tiles.num_sms() + 1))


def bounds_of(rows: list[int], units: int) -> np.ndarray:
    padded = np.array(rows + [0] * (ROOM - len(rows)), np.int32)
    return np.asarray(all_bounds(padded, len(rows), units))


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
